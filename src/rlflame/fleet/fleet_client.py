"""The fleet of a sweep as one of its seeds sees it, over the channel to its parent.

The other end is `fleet_server`.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from rlflame.errors import FleetError, make_error
from rlflame.fleet.base import (
    ContextManagerMixin,
    FleetReport,
    Traffic,
    check_fragment,
    make_policy_id,
)
from rlflame.rollout.process.channel import Channel, Message, MessageKind
from rlflame.rollout.task import Fragment, PolicyArrays, RolloutTask

_PROBE_S = 10.0
AnswerQueue = queue.SimpleQueue[tuple[MessageKind, dict[str, Any]]]


class FleetClient(ContextManagerMixin):
    """Weights and tasks go out, fragments come back; nothing runs here."""

    #: The sweep waits for the fleet.
    ready = True

    def __init__(self, channel: Channel, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._channel = channel
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answer_queues: dict[int, AnswerQueue] = {}
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._closed = False

    def put(self, policy: PolicyArrays) -> str:
        name = make_policy_id(policy)
        self._channel.send(MessageKind.POLICY, {"id": name, "arrays": dict(policy)})
        return name

    def release(self, policy_id: str) -> None:
        self._channel.send(MessageKind.FORGET, {"id": policy_id})

    def submit(self, tasks: Sequence[RolloutTask]) -> _RemoteSubmission:
        if self._closed:
            raise FleetError("The fleet was closed.")
        answers: AnswerQueue = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._answer_queues[number] = answers
        self._channel.send(MessageKind.TASK, {"number": number, "tasks": list(tasks)})
        return _RemoteSubmission(self, number, list(tasks), answers)

    def cancel(self, number: int) -> None:
        if self.forget(number):
            self._channel.send(MessageKind.CANCEL, {"number": number})

    def forget(self, number: int) -> bool:
        with self._lock:
            return self._answer_queues.pop(number, None) is not None

    def receive(self, message: Message) -> None:
        """An answer of the sweep; called by the thread that listens."""
        value = message.value
        if message.kind is MessageKind.HELLO:
            self._reports.put(value)
            return
        with self._lock:
            answers = self._answer_queues.get(value["number"])
        if answers is not None:
            answers.put((message.kind, value))

    def probe(self) -> FleetReport:
        self._channel.send(MessageKind.PROBE)
        try:
            report = self._reports.get(timeout=_PROBE_S)
        except queue.Empty:
            raise FleetError("The fleet does not say what it runs on.") from None
        return FleetReport(self.name, self.capacity, tuple(report["workers"]))

    def read_traffic(self) -> Traffic:
        """None: the fleet counts the traffic of all seeds together."""
        return Traffic()

    def close(self) -> None:
        self._closed = True
        with self._lock:
            numbers = list(self._answer_queues)
        for number in numbers:
            self.cancel(number)


class _RemoteSubmission:
    def __init__(
        self, fleet: FleetClient, number: int, tasks: list[RolloutTask], answers: AnswerQueue
    ) -> None:
        self._fleet = fleet
        self._number = number
        self._tasks = {task.slot: task for task in tasks}
        self._answers = answers

    def __iter__(self) -> Iterator[Fragment]:
        while self._tasks:
            kind, value = self._answers.get()
            if kind is MessageKind.FAILED:
                self._tasks.clear()
                self._fleet.forget(self._number)
                raise make_error(value)
            fragment = value["fragment"]
            task = self._tasks.pop(fragment.slot, None)
            if task is None:
                raise FleetError("A fragment came twice, or for a slot that nobody asked for.")
            if not self._tasks:
                self._fleet.forget(self._number)
            yield check_fragment(task, fragment)

    def cancel(self) -> None:
        self._tasks.clear()
        self._fleet.cancel(self._number)
