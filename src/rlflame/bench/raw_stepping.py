"""Steps of environments and nothing else: the limit that rollouts are measured against.

Processes repeat recorded resets and actions in an open loop, all at once. Each receives an order
(`env`, `pieces`, and a `way` to step), answers whether it is ready, and answers every number of
`seconds` with the `steps` it took in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from rlflame.errors import RlflameError
from rlflame.fleet.base import ContextManagerMixin
from rlflame.rollout.envs import user_code
from rlflame.rollout.envs.make import make_env
from rlflame.rollout.process.channel import Message, MessageKind, ProtocolError, wait
from rlflame.rollout.process.parent_channel import ParentChannel
from rlflame.rollout.process.worker_process import WorkerProcess
from rlflame.rollout.task import Array, EnvSpec, Fragment
from rlflame.training.trainer import StopRequest

WAYS = ("gymnasium", "mj_step")
#: Steps between two looks at the clock.
_CHUNK_STEPS = 100

#: (seed of the reset, actions after it)
Pieces = Sequence[tuple[int, Array]]
#: Steps for some seconds; returns the counts.
Step = Callable[[float], dict[str, Any]]


def make_pieces(
    rounds: Sequence[Sequence[Fragment]], to_environment: Callable[[Array], Array]
) -> Pieces:
    """All episodes of some rounds, also those that have not ended, as resets and actions.

    `to_environment` turns the recorded actions of a step into what the environments received.
    """
    pieces = []
    for fragments in zip(*rounds, strict=True):  # the same slot in every round
        # Step by step, as it was acted; the returned array may be used again for the next step.
        actions = [np.stack([to_environment(a).copy() for a in f.actions]) for f in fragments]
        for row in range(len(fragments[0].lengths)):
            parts: list[Array] = []
            for fragment, part in zip(fragments, actions, strict=True):
                begin = 0
                for episode in sorted(fragment.episodes, key=lambda episode: episode.end):
                    if episode.row == row:
                        parts.append(part[begin : episode.end + 1, row])
                        pieces.append((episode.seed, np.concatenate(parts)))
                        parts, begin = [], episode.end + 1
                parts.append(part[begin : fragment.lengths[row], row])
            if any(map(len, parts)):
                pieces.append((fragments[-1].states[row].seed, np.concatenate(parts)))
    return pieces


def iterate_gymnasium(spec: EnvSpec, pieces: Pieces) -> Iterator[float]:
    """A reward for each step, without an end."""
    env = make_env(spec)
    shape = spec.action_shape or (spec.action_size,)
    script: list[tuple[int, list[Any]]] = []
    for seed, part in pieces:
        is_discrete = spec.action_kind == "discrete"
        numbers = [int(action) + spec.action_start for action in part] if is_discrete else []
        script.append((seed, numbers or list(part.reshape(-1, *shape))))
    while True:
        for seed, actions in script:
            env.reset(seed=seed)
            for action in actions:
                _, reward, _, _, _ = env.step(action)
                yield float(reward)


def iterate_mujoco(spec: EnvSpec, pieces: Pieces) -> Iterator[float] | None:
    """The same by `mj_step` alone; None where the environment is no MuJoCo model."""
    env: Any = make_env(spec).unwrapped
    is_mujoco = all(hasattr(env, name) for name in ("model", "data", "frame_skip"))
    return _iterate_mujoco(env, pieces) if is_mujoco else None


def _iterate_mujoco(env: Any, pieces: Pieces) -> Iterator[float]:
    import mujoco

    model, data, skip = env.model, env.data, env.frame_skip
    script = []
    for seed, part in pieces:
        env.reset(seed=seed)
        script.append((data.qpos.copy(), data.qvel.copy(), part.astype(np.float64)))
    while True:
        for qpos, qvel, actions in script:
            mujoco.mj_resetData(model, data)
            data.qpos[:], data.qvel[:] = qpos, qvel
            mujoco.mj_forward(model, data)
            for action in actions:
                data.ctrl[:] = action
                mujoco.mj_step(model, data, nstep=skip)
                yield 0.0


def time_steps(
    steps: Iterator[float], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """The steps taken, some at least, and the seconds they took."""
    start_s, step_count, elapsed = clock(), 0, 0.0
    while not step_count or elapsed < seconds:
        for _ in range(_CHUNK_STEPS):
            next(steps)
        step_count, elapsed = step_count + _CHUNK_STEPS, clock() - start_s
    return {"steps": step_count, "seconds": elapsed}


class SteppingProcesses(ContextManagerMixin):
    """Processes that step at the same time, alive until closed, each with its own order.

    Whatever waits for them raises StopInterrupt where the user asks to stop.
    """

    def __init__(
        self, module: str, orders: Sequence[dict[str, Any]], hint: str, stop: StopRequest
    ) -> None:
        self._hint, self._stop = hint, stop
        self._processes: list[WorkerProcess] = []
        try:
            for order in orders:
                self._processes.append(WorkerProcess(module=module))
                self._processes[-1].channel.send(MessageKind.ORDER, order)
            self.is_possible = all(self._receive_answers())
        except BaseException:
            self.close()
            raise

    def step(self, seconds: float) -> list[dict[str, Any]]:
        """What each process has done in that time."""
        for child in self._processes:
            child.channel.send(MessageKind.TASK, seconds)
        return self._receive_answers()

    def _receive_answers(self) -> list[Any]:
        """A message of each, in their order."""
        answers = dict.fromkeys(self._processes)
        waiting = {child.channel: child for child in self._processes}
        while waiting:
            with self._stop.allow_interrupt():
                ready = wait(waiting)
            for channel in ready:
                child = waiting[channel]
                try:
                    if messages := channel.receive_all():
                        answers[child] = messages[0].value
                        del waiting[channel]
                except (EOFError, ProtocolError) as error:
                    message = (
                        f"Process {child.pid}, which is measured: {child.explain_loss(error)}."
                    )
                    raise RlflameError(message, self._hint, child.read_output().strip()) from error
        for child in self._processes:
            child.trim_output()
        return [*answers.values()]

    def close(self) -> None:
        while self._processes:
            self._processes.pop().terminate()


def make_raw_processes(
    env: EnvSpec, pieces: Pieces, way: str, workers: int, stop: StopRequest
) -> SteppingProcesses:
    """Processes that repeat a script in one way."""
    order = {"env": env, "pieces": [list(piece) for piece in pieces], "way": way}
    hint = "the same command with --no-limit leaves bare stepping out"
    return SteppingProcesses("rlflame.bench.raw_stepping", [order] * workers, hint, stop)


def sum_rates(answers: Sequence[dict[str, Any]]) -> float:
    """Steps a second of all processes together."""
    return sum(float(answer["steps"] / answer["seconds"]) for answer in answers)


def serve_steps(make_step: Callable[[Any], Step | None]) -> None:
    """The other end of SteppingProcesses: answer until the parent is gone.

    `make_step` takes the order, and returns None where there is no way to step.
    """
    channel, requests = ParentChannel.open(), SimpleQueue[Message]()
    order = channel.receive_order()
    channel.start_listening(requests.put)
    user_code.load_from_environment()
    step = make_step(order)
    channel.send(MessageKind.HELLO, step is not None)
    while step is not None:
        channel.send(MessageKind.RESULT, step(requests.get().value))


def make_raw_step(order: dict[str, Any]) -> Step | None:
    iterate = {"gymnasium": iterate_gymnasium, "mj_step": iterate_mujoco}[order["way"]]
    steps = iterate(order["env"], order["pieces"])
    if steps is None:
        return None
    next(steps)
    return lambda seconds: time_steps(steps, seconds)


if __name__ == "__main__":
    serve_steps(make_raw_step)
