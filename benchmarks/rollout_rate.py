"""Closed-loop rollouts as a share of the bare physics, or of the bare environment, one core.

    python benchmarks/rollout_rate.py --env Hopper-v5 [--stepped-by gymnasium] [--clock process]

The worker runs tasks of the environment's own preset, policy included, and what it did is written
down: every action, every reset. The same is then replayed open loop, in the same process and in
turn with the worker. For a MuJoCo environment that is `mj_step` alone, and a reset is setting the
state and `mj_forward`; for any other it is `step` of Gymnasium's instance without wrappers.
Processor time instead of wall time is for a machine that is shared.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlflame import build, presets
from rlflame.rollout.lockstep import EnvRow, fresh_state, make
from rlflame.rollout.rows import GymnasiumRows, open_rows, stepped_by
from rlflame.rollout.seeding import Role, reset_seed
from rlflame.rollout.spec import Array, EnvSpec, Fragment, PolicyArrays, RolloutTask
from rlflame.rollout.worker import RolloutWorker
from rlflame.trainer import Plan

CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="Hopper-v5")
    parser.add_argument("--steps", type=int, default=20_000, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--stepped-by", choices=["fastest", "gymnasium"], default="fastest")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    config, _ = presets.resolve(environment=options.env, continuous=build.acts_continuously)
    env = build.environment(config.learning.environment)
    plan = build.plan(config.recipe, env, "rate")
    policy = build.algorithm(config.learning, plan.policy).policy()
    own = options.stepped_by == "fastest"
    print(stepped_by(env) if own else "stepped by Gymnasium: asked for", flush=True)
    clock = CLOCKS[options.clock]
    worker = RolloutWorker(open_rows if own else GymnasiumRows)
    closed = ClosedLoop(plan, policy, options.steps, worker)
    closed.run()  # warm
    shares = []
    for turn in range(options.repeat):
        ours = closed.steps / timed(clock, closed.run)
        replay = bare(env, closed.fragments)
        limit = closed.steps / timed(clock, replay)
        shares.append(ours / limit)
        print(f"{turn + 1}: worker {ours:,.0f} steps/s, bare {limit:,.0f}, share {shares[-1]:.3f}",
              flush=True)  # fmt: skip
    print(f"{env.id}: {statistics.median(shares):.3f} of bare steps (median of {len(shares)})")


def timed(clock: Callable[[], float], run: Callable[[], None]) -> float:
    started = clock()
    run()
    return clock() - started


class ClosedLoop:
    """A slot's tasks, one after the other, and the fragments that came of the last ones."""

    def __init__(self, plan: Plan, policy: PolicyArrays, steps: int, worker: RolloutWorker) -> None:
        rows = plan.envs_per_slot
        seeds = [reset_seed(0, Role.RESET, 0, row, 0) for row in range(rows)]
        self._task = RolloutTask(
            run="rate", seed=0, purpose="train", iteration=0, slot=0, env=plan.env,
            policy=plan.policy, policy_id="p", unit="steps", steps=plan.steps,
            rows=rows, first_row=0, acting="sample", record=True,
            states=tuple(fresh_state(0, seed) for seed in seeds),
        )  # fmt: skip
        self._worker, self._policy = worker, policy
        self._count = max(1, steps // (rows * plan.steps))
        self.steps = self._count * rows * plan.steps
        self.fragments: list[tuple[RolloutTask, Fragment]] = []

    def run(self) -> None:
        self.fragments = []
        for _ in range(self._count):
            fragment = self._worker.run(self._task, lambda: self._policy)
            assert isinstance(fragment, Fragment)
            self.fragments.append((self._task, fragment))
            number = self._task.iteration + 1
            self._task = dataclasses.replace(self._task, states=fragment.states, iteration=number)


def bare(env: EnvSpec, fragments: list[tuple[RolloutTask, Fragment]]) -> Callable[[], None]:
    """The same steps and resets from the same states, and nothing between them."""
    task = fragments[0][0]
    rows = [EnvRow(env, row) for row in range(task.rows)]
    for row, state in zip(rows, task.states, strict=True):
        row.restore(state, np.zeros(env.observation_size, np.float32))
    worlds: list[Any] = [row._env.unwrapped for row in rows]  # type: ignore[union-attr]
    given: list[Array] = []
    resets: list[list[tuple[int, int]]] = []
    for task, fragment in fragments:
        given += list(_given(env, fragment.actions))
        begun: list[list[tuple[int, int]]] = [[] for _ in range(task.steps)]
        for old in fragment.episodes:
            seed = reset_seed(task.seed, Role.RESET, task.slot, old.row, old.episode + 1)
            begun[old.end].append((old.row, seed))
        resets += begun
    replay = bare_physics if hasattr(worlds[0], "do_simulation") else bare_steps
    return replay(worlds, given, resets)


def _given(env: EnvSpec, actions: Array) -> Array:
    if env.action_kind == "discrete":
        return actions + env.action_start
    inside = np.clip(actions, np.float32(env.action_low), np.float32(env.action_high))
    return inside.reshape(*actions.shape[:2], *(env.action_shape or (-1,)))


def bare_steps(
    worlds: list[Any], given: list[Array], resets: list[list[tuple[int, int]]]
) -> Callable[[], None]:
    def replay() -> None:
        for actions, begun in zip(given, resets, strict=True):
            for world, action in zip(worlds, actions, strict=True):
                world.step(action)
            for row, seed in begun:
                worlds[row].reset(seed=seed)

    return replay


def bare_physics(
    worlds: list[Any], given: list[Array], resets: list[list[tuple[int, int]]]
) -> Callable[[], None]:
    import mujoco

    model, skip = worlds[0].model, worlds[0].frame_skip
    step, forward, reset = mujoco.mj_step, mujoco.mj_forward, mujoco.mj_resetData
    bodies = [world.data for world in worlds]
    controls = [list(actions.astype(np.float64)) for actions in given]
    scratch = make(EnvSpec(worlds[0].spec.id, {}, None, 0, "discrete", 0, 0, (), ())).unwrapped
    begins: list[list[tuple[Any, Array, Array]]] = []
    for begun in resets:
        begins.append([])
        for row, seed in begun:
            scratch.reset(seed=seed)
            qpos, qvel = scratch.data.qpos.copy(), scratch.data.qvel.copy()
            begins[-1].append((bodies[row], qpos, qvel))
    moved = [(data.ctrl, data) for data in bodies]

    def replay() -> None:
        for actions, begun in zip(controls, begins, strict=True):
            for (control, data), action in zip(moved, actions, strict=True):
                control[:] = action
                step(model, data, skip)
            for data, qpos, qvel in begun:
                reset(model, data)
                data.qpos[:] = qpos
                data.qvel[:] = qvel
                forward(model, data)

    return replay


if __name__ == "__main__":
    main()
