"""Steps of environments and nothing else: the limit that rollouts are measured against.

Processes repeat recorded resets and actions in an open loop, all at once. Each receives an `order`
(the file of a `script` and a `way`), answers `ready`, or `absent` where there is no MuJoCo model,
and answers every `step` with the `steps` it took and their `seconds`.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from rlflame.errors import RlflameError
from rlflame.fleet.base import ContextManagerMixin
from rlflame.rollout.envs import user_code
from rlflame.rollout.envs.make import make_env
from rlflame.rollout.process.channel import Message, MessageKind, ProtocolError, wait
from rlflame.rollout.process.parent_channel import ParentChannel
from rlflame.rollout.process.worker_process import (
    WorkerProcess,
    describe_exit,
    format_exit_clause,
)
from rlflame.rollout.task import Array, EnvSpec, Fragment
from rlflame.training.trainer import StopRequest

WAYS = ("gymnasium", "mj_step")
#: Steps between two looks at the clock.
_CHUNK_STEPS = 100
#: Signals by which another program, or a system without memory, ends a process.
_OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
#: For a process whose pipe is closed to be seen to have ended by itself.
_GRACE_S = 1.0

#: (seed of the reset, actions after it)
Pieces = list[tuple[int, Array]]


def make_pieces(
    rounds: Sequence[Sequence[Fragment]], to_environment: Callable[[Array], Array]
) -> Pieces:
    """All episodes of some rounds, also those that have not ended, as resets and actions.

    `to_environment` turns the recorded actions of a step into what the environments received.
    """
    pieces: Pieces = []
    for fragments in zip(*rounds, strict=True):  # the same slot in every round
        # Step by step, as it was acted; the returned array may be used again for the next step.
        actions = [np.stack([to_environment(a).copy() for a in f.actions]) for f in fragments]
        for row in range(len(fragments[0].lengths)):
            parts = [
                part[: f.lengths[row], row] for part, f in zip(actions, fragments, strict=True)
            ]
            begin, script, starts = 0, np.concatenate(parts), np.cumsum([0, *map(len, parts)])
            ends = [
                (int(start) + episode.end + 1, episode.seed)
                for start, fragment in zip(starts, fragments, strict=False)
                for episode in fragment.episodes
                if episode.row == row
            ]
            for end, seed in sorted(ends):
                pieces.append((seed, script[begin:end]))
                begin = end
            if begin < len(script):
                pieces.append((fragments[-1].states[row].seed, script[begin:]))
    return pieces


def save_trace(path: Path, env: EnvSpec, pieces: Pieces) -> None:
    seeds, parts = zip(*pieces, strict=True)
    np.savez(
        path,
        env=np.array(json.dumps(asdict(env))),
        seeds=np.array(seeds, np.uint64),
        lengths=np.array([len(part) for part in parts], np.int64),
        actions=np.concatenate(parts),
    )


def read_trace(path: Path) -> tuple[EnvSpec, Pieces]:
    with np.load(path, allow_pickle=False) as arrays:
        spec = EnvSpec(**json.loads(str(arrays["env"])))
        parts = np.split(arrays["actions"], np.cumsum(arrays["lengths"])[:-1])
        return spec, [(int(seed), part) for seed, part in zip(arrays["seeds"], parts, strict=True)]


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
) -> tuple[int, float]:
    """Steps taken, some at least, and the seconds they took."""
    start_s, step_count, elapsed = clock(), 0, 0.0
    while not step_count or elapsed < seconds:
        for _ in range(_CHUNK_STEPS):
            next(steps)
        step_count, elapsed = step_count + _CHUNK_STEPS, clock() - start_s
    return step_count, elapsed


class SteppingProcesses(ContextManagerMixin):
    """Processes that step at the same time, alive until closed, each with its own order.

    Whatever waits for them raises StopInterrupt where the user asks to stop.
    """

    def __init__(
        self,
        module: str,
        orders: Sequence[dict[str, Any]],
        refusal: str,
        hint: str,
        stop: StopRequest,
    ) -> None:
        self._refusal, self._hint, self._stop = refusal, hint, stop
        self._processes: list[WorkerProcess] = []
        try:
            for order in orders:
                self._processes.append(WorkerProcess(module=module))
                self._processes[-1].channel.send(MessageKind.ORDER, order)
            answers = self._receive_answers()
        except BaseException:
            self.close()
            raise
        self.is_possible = all(answer["ready"] for answer in answers)

    def step(self, seconds: float) -> list[dict[str, Any]]:
        """What each process has done in that time."""
        for child in self._processes:
            child.channel.send(MessageKind.TASK, {"seconds": seconds})
        return self._receive_answers()

    def _receive_answers(self) -> list[dict[str, Any]]:
        """A message of each, in their order."""
        answer_by_number: dict[int, dict[str, Any]] = {}
        waiting = {child.channel: number for number, child in enumerate(self._processes)}
        while waiting:
            with self._stop.allow_interrupt():
                ready = wait(waiting)
            for channel in ready:
                child = self._processes[waiting[channel]]
                try:
                    messages = channel.receive_all()
                    if messages:
                        answer_by_number[waiting.pop(channel)] = messages[0].value
                except (EOFError, ProtocolError) as error:
                    raise self._make_loss_error(child, error) from error
        for child in self._processes:
            child.trim_output()
        return [answer_by_number[number] for number in range(len(self._processes))]

    def _make_loss_error(self, child: WorkerProcess, error: Exception) -> RlflameError:
        code = child.terminate(_GRACE_S)
        message = f"{self._refusal} Process {child.pid}: {str(error) or describe_exit(code)}."
        if not str(error) and -code in _OUTSIDE_SIGNALS:
            message = f"Process {child.pid}, which is measured, {format_exit_clause(code)}."
        return RlflameError(message, self._hint, child.read_output().strip())

    def close(self) -> None:
        while self._processes:
            self._processes.pop().terminate()


def make_raw_processes(
    trace_path: Path, way: str, workers: int, stop: StopRequest
) -> SteppingProcesses:
    """Processes that repeat a script in one way."""
    return SteppingProcesses(
        "rlflame.bench.raw_stepping",
        [{"script": str(trace_path), "way": way}] * workers,
        "The environment could not be stepped on its own.",
        "the same command with --no-limit leaves that out",
        stop,
    )


def sum_rates(answers: Sequence[dict[str, Any]]) -> float:
    """Steps a second of all processes together."""
    return sum(float(answer["steps"] / answer["seconds"]) for answer in answers)


class StepServer:
    """The other end of SteppingProcesses, in each of the processes."""

    def __init__(self) -> None:
        self._channel = ParentChannel.open()
        self.order: dict[str, Any] = self._channel.receive_order()
        self._requests: SimpleQueue[Message] = SimpleQueue()
        self._channel.start_listening(self._requests.put)

    def serve(self, step: Callable[[float], dict[str, Any]] | None) -> None:
        """Answer until the parent is gone; without a way to step, say so."""
        self._channel.send(MessageKind.HELLO, {"ready": step is not None})
        while step is not None:
            request = self._requests.get().value
            self._channel.send(MessageKind.RESULT, step(request["seconds"]))


def main() -> None:
    server = StepServer()
    user_code.load_from_environment()
    spec, pieces = read_trace(Path(server.order["script"]))
    steps = {"gymnasium": iterate_gymnasium, "mj_step": iterate_mujoco}[server.order["way"]](
        spec, pieces
    )
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
