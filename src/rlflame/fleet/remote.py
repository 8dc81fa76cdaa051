"""A fleet that the job lends to a seed: the contract, spoken over the pipe. fleet_server.py is the
other end.

Must not know: which fleet it is, algorithms, files.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Sequence

from rlflame import errors
from rlflame.errors import FleetError, RlflameError
from rlflame.fleet.base import (
    ContextManagerMixin,
    FleetReport,
    Traffic,
    check_fragment,
    make_policy_id,
)
from rlflame.rollout.process.parent_channel import Message, ParentChannel
from rlflame.rollout.spec import Fragment, PolicyArrays, RolloutTask

_PROBE_S = 10.0
_ERROR_TYPES: dict[str, type[RlflameError]] = {
    kind.__name__: kind
    for kind in (errors.EnvironmentFailure, errors.FleetError, errors.FleetUnreachableError)
}
MessageQueue = queue.SimpleQueue[Message]


class RemoteFleet(ContextManagerMixin):
    """Weights and tasks go out, fragments come back; nothing runs here."""

    #: Whoever lends it waits for it.
    ready = True

    def __init__(self, channel: ParentChannel, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._channel = channel
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answer_queues: dict[int, MessageQueue] = {}
        self._reports: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._traffic = Traffic()
        self._closed = False

    def put(self, policy: PolicyArrays) -> str:
        name = make_policy_id(policy)
        self._channel.send("put", id=name, arrays=dict(policy))
        return name

    def release(self, policy_id: str) -> None:
        self._channel.send("release", id=policy_id)

    def submit(self, tasks: Sequence[RolloutTask]) -> _RemoteSubmission:
        if self._closed:
            raise FleetError("The fleet was closed.")
        answers: MessageQueue = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._answer_queues[number] = answers
        self._channel.send("submit", number=number, tasks=list(tasks))
        return _RemoteSubmission(self, number, list(tasks), answers)

    def cancel(self, number: int) -> None:
        if self.forget(number):
            self._channel.send("cancel", number=number)

    def forget(self, number: int) -> bool:
        with self._lock:
            return self._answer_queues.pop(number, None) is not None

    def receive(self, message: Message) -> None:
        """What the job answers; called by the thread that listens."""
        if message["what"] == "report":
            self._reports.put(message)
            return
        with self._lock:
            answers = self._answer_queues.get(message["number"])
        if answers is not None:
            answers.put(message)

    def probe(self) -> FleetReport:
        self._channel.send("probe")
        try:
            report = self._reports.get(timeout=_PROBE_S)
        except queue.Empty:
            raise FleetError("The fleet does not say what it runs on.") from None
        return FleetReport(self.name, self.capacity, tuple(report["workers"]))

    def read_traffic(self) -> Traffic:
        """Of this seed there is no account: what travels, the fleet counts for all of them."""
        return Traffic()

    def close(self) -> None:
        self._closed = True
        with self._lock:
            numbers = list(self._answer_queues)
        for number in numbers:
            self.cancel(number)


class _RemoteSubmission:
    def __init__(
        self, fleet: RemoteFleet, number: int, tasks: list[RolloutTask], answers: MessageQueue
    ) -> None:
        self._fleet = fleet
        self._number = number
        self._tasks = {task.slot: task for task in tasks}
        self._answers = answers

    def __iter__(self) -> Iterator[Fragment]:
        while self._tasks:
            message = self._answers.get()
            if message["what"] == "lost":
                self._tasks.clear()
                self._fleet.forget(self._number)
                raise make_error(message)
            fragment = message["fragment"]
            task = self._tasks.pop(fragment.slot, None)
            if task is None:
                raise FleetError("A fragment came twice, or for a slot that nobody asked for.")
            if not self._tasks:
                self._fleet.forget(self._number)
            yield check_fragment(task, fragment)

    def cancel(self) -> None:
        self._tasks.clear()
        self._fleet.cancel(self._number)


def as_message(error: RlflameError) -> Message:
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "detail": error.detail,
        "exit_code": error.exit_code,
    }


def make_error(message: Message) -> RlflameError:
    """The error again, of its own kind where that is one of ours."""
    error_type = _ERROR_TYPES.get(message["kind"], RlflameError)
    error = error_type(message["message"], message["hint"], message["detail"])
    error.exit_code = int(message["exit_code"])
    return error
