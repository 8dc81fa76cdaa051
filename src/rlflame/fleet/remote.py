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
from rlflame.fleet.base import Closing, FleetReport, Traffic, checked, policy_id
from rlflame.rollout.process.parent_channel import Line, Message
from rlflame.rollout.spec import Fragment, PolicyArrays, RolloutTask

_PROBE_S = 10.0
_KINDS: dict[str, type[RlflameError]] = {
    kind.__name__: kind
    for kind in (errors.EnvironmentFailure, errors.FleetError, errors.FleetUnreachable)
}
Answers = queue.SimpleQueue[Message]


class LentFleet(Closing):
    """Weights and tasks go out, fragments come back; nothing runs here."""

    #: Whoever lends it waits for it.
    ready = True

    def __init__(self, line: Line, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._line = line
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Answers] = {}
        self._reports: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._traffic = Traffic()
        self._closed = False

    def put(self, policy: PolicyArrays) -> str:
        name = policy_id(policy)
        self._line.tell("put", id=name, arrays=dict(policy))
        return name

    def release(self, policy_id: str) -> None:
        self._line.tell("release", id=policy_id)

    def submit(self, tasks: Sequence[RolloutTask]) -> _LentSubmission:
        if self._closed:
            raise FleetError("The fleet was closed.")
        answers: Answers = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answers
        self._line.tell("submit", number=number, tasks=list(tasks))
        return _LentSubmission(self, number, list(tasks), answers)

    def cancel(self, number: int) -> None:
        if self.forget(number):
            self._line.tell("cancel", number=number)

    def forget(self, number: int) -> bool:
        with self._lock:
            return self._waiting.pop(number, None) is not None

    def hear(self, message: Message) -> None:
        """What the job answers; called by the thread that listens."""
        if message["what"] == "report":
            self._reports.put(message)
            return
        with self._lock:
            answers = self._waiting.get(message["number"])
        if answers is not None:
            answers.put(message)

    def probe(self) -> FleetReport:
        self._line.tell("probe")
        try:
            found = self._reports.get(timeout=_PROBE_S)
        except queue.Empty:
            raise FleetError("The fleet does not say what it runs on.") from None
        return FleetReport(self.name, self.capacity, tuple(found["workers"]))

    def traffic(self) -> Traffic:
        """Of this seed there is no account: what travels, the fleet counts for all of them."""
        return Traffic()

    def close(self) -> None:
        self._closed = True
        with self._lock:
            waiting = list(self._waiting)
        for number in waiting:
            self.cancel(number)


class _LentSubmission:
    def __init__(
        self, fleet: LentFleet, number: int, tasks: list[RolloutTask], answers: Answers
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
                raise error_of(message)
            fragment = message["fragment"]
            task = self._tasks.pop(fragment.slot, None)
            if task is None:
                raise FleetError("A fragment came twice, or for a slot that nobody asked for.")
            if not self._tasks:
                self._fleet.forget(self._number)
            yield checked(task, fragment)

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


def error_of(message: Message) -> RlflameError:
    """The error again, of its own kind where that is one of ours."""
    kind = _KINDS.get(message["kind"], RlflameError)
    error = kind(message["message"], message["hint"], message["detail"])
    error.exit_code = int(message["exit_code"])
    return error
