"""Processes that step for so long whenever they are told to, all of them at once.

Each is told its order, says whether it is `ready`, and answers every `step` with the `steps` it
took and their `seconds`. Must not know: what is stepped, and how.
"""

from __future__ import annotations

import select
import signal
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from rlflame.errors import RlflameError
from rlflame.fleet.base import ContextManagerMixin
from rlflame.rollout import wire
from rlflame.rollout.process.parent_channel import Message, ParentChannel
from rlflame.rollout.process.worker_main import FrameKind
from rlflame.rollout.process.worker_process import (
    ProtocolError,
    WorkerProcess,
    describe_exit,
    format_exit_clause,
)
from rlflame.training.trainer import StopRequest

#: With these, as a rule, somebody else ends a process, or the system does where memory runs out.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)

#: For a process whose pipe is closed to be seen to have ended by itself.
_GRACE_S = 1.0


class SteppingProcesses(ContextManagerMixin):
    """Alive until closed, each with an order of its own; StopNow where somebody asks to stop."""

    def __init__(
        self, module: str, orders: Sequence[Message], refusal: str, hint: str, stop: StopRequest
    ) -> None:
        self._refusal, self._hint, self._stop = refusal, hint, stop
        self._processes: list[WorkerProcess] = []
        try:
            for order in orders:
                self._processes.append(WorkerProcess(module=module))
                _send(self._processes[-1], "order", **order)
            # All of them are heard: each has an answer of its own.
            words = {answer["what"] for answer in self._receive_answers()}
        except BaseException:
            self.close()
            raise
        self.is_possible = words == {"ready"}

    def step(self, seconds: float) -> list[dict[str, Any]]:
        """What each has done meanwhile."""
        for child in self._processes:
            _send(child, "step", seconds=seconds)
        return self._receive_answers()

    def _receive_answers(self) -> list[Message]:
        """A message of each, in their order."""
        answer_by_number: dict[int, Message] = {}
        waiting = {child.answers: number for number, child in enumerate(self._processes)}
        while waiting:
            with self._stop.allow_interrupt():
                full = [child.requests for child in self._processes if child.has_backlog]
                ready, _, _ = select.select([*waiting], full, [])
            for child in self._processes:
                child.flush()
            for answers in ready:
                child = self._processes[waiting[answers]]
                try:
                    frames = child.receive()
                except (EOFError, ProtocolError) as error:
                    raise self._make_loss_error(child, error) from error
                if frames:
                    answer_by_number[waiting.pop(answers)] = wire.decode(frames[0][1])
        for child in self._processes:
            child.trim_output()
        return [answer_by_number[number] for number in range(len(self._processes))]

    def _make_loss_error(self, child: WorkerProcess, error: Exception) -> RlflameError:
        code = child.terminate(_GRACE_S)
        message = f"{self._refusal} Process {child.pid}: {str(error) or describe_exit(code)}."
        if not str(error) and -code in _FROM_OUTSIDE:
            message = f"Process {child.pid}, which is measured, {format_exit_clause(code)}."
        return RlflameError(message, self._hint, child.read_output().strip())

    def close(self) -> None:
        while self._processes:
            self._processes.pop().terminate()


def sum_rates(answers: Sequence[dict[str, Any]]) -> float:
    """Steps a second of all of them."""
    return sum(float(answer["steps"] / answer["seconds"]) for answer in answers)


def _send(child: WorkerProcess, kind: str, **values: Any) -> None:
    child.send(FrameKind.TASK, wire.encode({"what": kind, **values}))


class StepServer:
    """The same, as one of these processes sees it."""

    def __init__(self) -> None:
        self._channel = ParentChannel.open()
        order = self._channel.receive()
        assert order is not None
        self.order = order
        self._requests: SimpleQueue[Message] = SimpleQueue()
        self._channel.start_listening(self._requests.put)

    def serve(self, step: Callable[[float], dict[str, Any]] | None) -> None:
        """For as long as the other side is there; without a way to step, it is told so."""
        self._channel.send("absent" if step is None else "ready")
        while step is not None:
            self._channel.send("stepped", **step(self._requests.get()["seconds"]))
