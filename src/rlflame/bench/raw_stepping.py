"""A process that steps an environment with recorded actions and does nothing else.

The reference that rollouts are measured against: the same resets and actions, open loop. Its order
is the file of a `script` and a `way`, `gymnasium` or `mj_step`; it is `absent` where there is no
MuJoCo model to step. Must not know: workers, policies, fleets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.bench.stepping_processes import StepServer
from rlflame.rollout.envs import user_code
from rlflame.rollout.envs.make import make_env
from rlflame.rollout.spec import Array, EnvSpec

#: (seed of the reset, actions after it)
Pieces = list[tuple[int, Array]]
_AT_ONCE = 100


def read_trace(path: Path) -> tuple[EnvSpec, Pieces]:
    with np.load(path, allow_pickle=False) as held:
        spec = EnvSpec(**json.loads(str(held["env"])))
        ends = np.cumsum(held["lengths"])[:-1]
        parts = np.split(held["actions"], ends)
        return spec, [(int(seed), part) for seed, part in zip(held["seeds"], parts, strict=True)]


def iterate_gymnasium(spec: EnvSpec, pieces: Pieces) -> Iterator[float]:
    """A reward for each step, for ever."""
    env = make_env(spec)
    discrete = spec.action_kind == "discrete"
    shape = spec.action_shape or (spec.action_size,)
    ready: list[tuple[int, list[Any]]] = [
        (
            seed,
            [int(action) + spec.action_start for action in part]
            if discrete
            else list(part.reshape(-1, *shape)),
        )
        for seed, part in pieces
    ]
    while True:
        for seed, actions in ready:
            env.reset(seed=seed)
            for action in actions:
                _, reward, _, _, _ = env.step(action)
                yield float(reward)


def iterate_mujoco(spec: EnvSpec, pieces: Pieces) -> Iterator[float] | None:
    """The same through `mj_step` alone; None where the environment is no MuJoCo model."""
    env: Any = make_env(spec).unwrapped
    if not all(hasattr(env, name) for name in ("model", "data", "frame_skip")):
        return None
    return _iterate_mujoco(env, pieces)


def _iterate_mujoco(env: Any, pieces: Pieces) -> Iterator[float]:
    import mujoco

    model, data, skip = env.model, env.data, env.frame_skip
    ready = []
    for seed, part in pieces:
        env.reset(seed=seed)
        ready.append((data.qpos.copy(), data.qvel.copy(), part.astype(np.float64)))
    while True:
        for qpos, qvel, actions in ready:
            mujoco.mj_resetData(model, data)
            data.qpos[:], data.qvel[:] = qpos, qvel
            mujoco.mj_forward(model, data)
            for action in actions:
                data.ctrl[:] = action
                mujoco.mj_step(model, data, nstep=skip)
                yield 0.0


def time_steps(
    steps: Iterator[float], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, float]:
    """Steps taken, some at least, and the seconds they took; the clock is asked now and then."""
    start_s, step_count, elapsed = clock(), 0, 0.0
    while not step_count or elapsed < seconds:
        for _ in range(_AT_ONCE):
            next(steps)
        step_count, elapsed = step_count + _AT_ONCE, clock() - start_s
    return step_count, elapsed


def main() -> None:
    server = StepServer()
    user_code.load_from_environment()
    spec, pieces = read_trace(Path(server.order["script"]))
    way = iterate_gymnasium if server.order["way"] == "gymnasium" else iterate_mujoco
    steps = way(spec, pieces)
    if steps is None:
        server.serve(None)
        return
    next(steps)

    def step(seconds: float) -> dict[str, Any]:
        step_count, elapsed = time_steps(steps, seconds)
        return {"steps": step_count, "seconds": elapsed}

    server.serve(step)


if __name__ == "__main__":
    main()
