"""Processes that all step at once for as long as they are told.

Each gets an order, says whether it is ready, and answers every task with the `steps` it took and
their `seconds`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from rlflame.errors import RlflameError
from rlflame.fleet.base import ContextManagerMixin
from rlflame.rollout.process.channel import Message, MessageKind, ProtocolError, wait
from rlflame.rollout.process.parent_channel import ParentChannel
from rlflame.rollout.process.worker_process import (
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
            # All of them are heard: each has an answer of its own.
            words = {answer["ready"] for answer in self._receive_answers()}
        except BaseException:
            self.close()
            raise
        self.is_possible = words == {True}

    def step(self, seconds: float) -> list[dict[str, Any]]:
        """What each has done meanwhile."""
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
        if not str(error) and -code in _FROM_OUTSIDE:
            message = f"Process {child.pid}, which is measured, {format_exit_clause(code)}."
        return RlflameError(message, self._hint, child.read_output().strip())

    def close(self) -> None:
        while self._processes:
            self._processes.pop().terminate()


def sum_rates(answers: Sequence[dict[str, Any]]) -> float:
    """Steps a second of all of them."""
    return sum(float(answer["steps"] / answer["seconds"]) for answer in answers)


class StepServer:
    """The same, as one of these processes sees it."""

    def __init__(self) -> None:
        self._channel = ParentChannel.open()
        self.order: dict[str, Any] = self._channel.receive_order()
        self._requests: SimpleQueue[Message] = SimpleQueue()
        self._channel.start_listening(self._requests.put)

    def serve(self, step: Callable[[float], dict[str, Any]] | None) -> None:
        """For as long as the other side is there; without a way to step, it is told so."""
        self._channel.send(MessageKind.HELLO, {"ready": step is not None})
        while step is not None:
            request = self._requests.get().value
            self._channel.send(MessageKind.RESULT, step(request["seconds"]))
