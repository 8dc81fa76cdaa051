"""Measures bare environment stepping, whose speed is the limit for rollouts.

Several processes repeat random episodes. Each process receives the environment and the `way` to
step it, and answers whether this is possible. For each request, it then steps for a number of
seconds and returns its counts.
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
from rlflame.rollout.task import EnvSpec
from rlflame.training.trainer import StopRequest

WAYS = ("gymnasium", "mj_step")
#: The number of recorded steps, and the number of steps between two readings of the clock.
_SCRIPT_STEPS, _CHUNK_STEPS = 2_000, 100

#: The reset seed and the actions of an episode.
Episode = tuple[int, list[Any]]
#: A function that steps for a number of seconds and returns the counts.
Step = Callable[[float], dict[str, Any]]


def record_script(env: Any) -> list[Episode]:
    """Record episodes of random actions; the last may be incomplete."""
    env.action_space.seed(0)
    script = list[Episode]()
    is_over = True
    for _ in range(_SCRIPT_STEPS):
        if is_over:
            script.append((len(script), []))
            env.reset(seed=script[-1][0])
        script[-1][1].append(env.action_space.sample())
        _, _, terminated, truncated, _ = env.step(script[-1][1][-1])
        is_over = terminated or truncated
    return script


def iterate_gymnasium(env: Any, script: Sequence[Episode]) -> Iterator[float]:
    """Repeat the episodes forever through the Gymnasium API; yield the rewards."""
    while True:
        for seed, actions in script:
            env.reset(seed=seed)
            for action in actions:
                _, reward, _, _, _ = env.step(action)
                yield float(reward)


def iterate_mujoco(env: Any, script: Sequence[Episode]) -> Iterator[float]:
    """Repeat the episodes forever with `mj_step`, without Gymnasium; yield zeros."""
    import mujoco

    model, data, skip = env.model, env.data, env.frame_skip
    starts = []
    for seed, actions in script:
        env.reset(seed=seed)
        starts.append((data.qpos.copy(), data.qvel.copy(), np.array(actions, np.float64)))
    while True:
        for qpos, qvel, controls in starts:
            mujoco.mj_resetData(model, data)
            data.qpos[:], data.qvel[:] = qpos, qvel
            mujoco.mj_forward(model, data)
            for control in controls:
                data.ctrl[:] = control
                mujoco.mj_step(model, data, nstep=skip)
                yield 0.0


def time_steps(
    steps: Iterator[float], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Step for about `seconds`, but at least for one chunk; return the counts."""
    start_s, step_count, elapsed = clock(), 0, 0.0
    while not step_count or elapsed < seconds:
        for _ in range(_CHUNK_STEPS):
            next(steps)
        step_count, elapsed = step_count + _CHUNK_STEPS, clock() - start_s
    return {"steps": step_count, "seconds": elapsed}


class SteppingProcesses(ContextManagerMixin):
    """Processes that step environments at the same time.

    Each process receives one of the `orders`. Methods that wait for the processes raise
    StopInterrupt if the user asks to stop.
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
        """Step for `seconds` in all processes, and return the counts of each."""
        for child in self._processes:
            child.channel.send(MessageKind.TASK, seconds)
        return self._receive_answers()

    def _receive_answers(self) -> list[Any]:
        """Receive a message from each process, in order."""
        answers = []
        for child in self._processes:
            messages: list[Message] = []
            try:
                while not messages:
                    with self._stop.allow_interrupt():
                        wait([child.channel])
                    messages = child.channel.receive_all()
            except (EOFError, ProtocolError) as error:
                message = f"Process {child.pid} of the benchmark: {child.explain_loss(error)}."
                raise RlflameError(message, self._hint, child.read_output().strip()) from error
            answers.append(messages[0].value)
            child.trim_output()
        return answers

    def close(self) -> None:
        while self._processes:
            self._processes.pop().terminate()


def make_raw_processes(
    env: EnvSpec, way: str, workers: int, stop: StopRequest
) -> SteppingProcesses:
    """Start processes that repeat random episodes, stepped in one of the `WAYS`."""
    order = {"env": env, "way": way}
    hint = "add --no-limit to skip bare stepping"
    return SteppingProcesses("rlflame.bench.raw_stepping", [order] * workers, hint, stop)


def sum_rates(answers: Sequence[dict[str, Any]]) -> float:
    """Return the total steps per second of all processes."""
    return sum(float(answer["steps"] / answer["seconds"]) for answer in answers)


def serve_steps(make_step: Callable[[Any], Step | None]) -> None:
    """Run the child side of SteppingProcesses: answer requests until the parent ends.

    `make_step` receives the order and returns None if the order cannot be carried out.
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
    """Return an order's step function; None if `mj_step` cannot step the environment."""
    env: Any = make_env(order["env"])
    script, steps = record_script(env), iterate_gymnasium
    if order["way"] == "mj_step":
        env, steps = env.unwrapped, iterate_mujoco
        if not all(hasattr(env, name) for name in ("model", "data", "frame_skip")):
            return None
    iterator = steps(env, script)
    next(iterator)
    return lambda seconds: time_steps(iterator, seconds)


if __name__ == "__main__":
    serve_steps(make_raw_step)
