"""The fleet that a sweep shares with its seeds: tasks and fragments over a channel.

`FleetClient` is the end in the process of a seed, and `FleetServer` the one in the sweep.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.errors import FleetError, RlflameError, make_error
from rlflame.rollout.process.channel import Channel, Message, MessageKind, WakePipe
from rlflame.rollout.task import Fragment, PolicyArrays, RolloutTask

from .base import (
    ContextManagerMixin,
    Fleet,
    FleetReport,
    Submission,
    Traffic,
    check_fragment,
    make_policy_id,
)

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
        return _RemoteSubmission(self, number, {task.slot: task for task in tasks}, answers)

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


@dataclass(eq=False)
class _RemoteSubmission:
    """The tasks that wait for their fragments, by slot."""

    fleet: FleetClient
    number: int
    tasks: dict[int, RolloutTask]
    answers: AnswerQueue

    def __iter__(self) -> Iterator[Fragment]:
        while self.tasks:
            kind, value = self.answers.get()
            if kind is MessageKind.FAILED:
                self.tasks.clear()
                self.fleet.forget(self.number)
                raise make_error(value)
            fragment = value["fragment"]
            task = self.tasks.pop(fragment.slot, None)
            if task is None:
                raise FleetError("A fragment came twice, or for a slot that nobody asked for.")
            if not self.tasks:
                self.fleet.forget(self.number)
            yield check_fragment(task, fragment)

    def cancel(self) -> None:
        self.tasks.clear()
        self.fleet.cancel(self.number)


class FleetServer:
    """What one seed has on the fleet; `close()` takes all of it back.

    One thread handles the seed's requests in order and one each submission, so that the sweep never
    waits for a fleet. Answers go into the seed's `channel`. The thread that waits for the channel
    is woken for what the pipe did not take at once.
    """

    def __init__(self, fleet: Fleet, channel: Channel, wake_pipe: WakePipe) -> None:
        self._fleet = fleet
        self._channel = channel
        self._wake_pipe = wake_pipe
        self._requests: queue.SimpleQueue[tuple[MessageKind, Any] | None] = queue.SimpleQueue()
        self._policy_uses: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._submissions: dict[int, Submission] = {}
        self._thread = threading.Thread(target=self._serve, name="rlflame-lending", daemon=True)
        self._thread.start()

    def receive(self, kind: MessageKind, value: Any) -> None:
        self._requests.put((kind, value))

    def close(self) -> None:
        """Cancel and release what the seed had, without waiting for it."""
        self._requests.put(None)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            self._handle(*request)
        with self._lock:
            submissions, self._submissions = [*self._submissions.values()], {}
        for submission in submissions:
            with contextlib.suppress(Exception):
                submission.cancel()
        for name in self._policy_uses.elements():
            with contextlib.suppress(Exception):
                self._fleet.release(name)

    def _handle(self, kind: MessageKind, value: Any) -> None:
        if kind is MessageKind.POLICY:
            with contextlib.suppress(RlflameError):  # the submission that needs it will raise
                self._fleet.put(value["arrays"])
                self._policy_uses[value["id"]] += 1
        elif kind is MessageKind.FORGET:
            if self._policy_uses[value["id"]] > 0:
                self._policy_uses[value["id"]] -= 1
                self._fleet.release(value["id"])
        elif kind is MessageKind.TASK:
            self._submit(value["number"], list(value["tasks"]))
        elif kind is MessageKind.CANCEL:
            with self._lock:
                submission = self._submissions.pop(value["number"], None)
            if submission is not None:
                submission.cancel()
        elif kind is MessageKind.PROBE:
            threading.Thread(target=self._probe, daemon=True).start()

    def _submit(self, number: int, tasks: list[RolloutTask]) -> None:
        try:
            submission = self._fleet.submit(tasks)
        except RlflameError as error:
            self._send_error(number, error)
            return
        with self._lock:
            self._submissions[number] = submission
        threading.Thread(
            target=self._collect, args=(number, submission), name="rlflame-lent", daemon=True
        ).start()

    def _collect(self, number: int, submission: Submission) -> None:
        try:
            for fragment in submission:
                self._send(MessageKind.RESULT, {"number": number, "fragment": fragment})
        except RlflameError as error:
            self._send_error(number, error)
        finally:
            with self._lock:
                self._submissions.pop(number, None)

    def _send_error(self, number: int, error: RlflameError) -> None:
        self._send(MessageKind.FAILED, {"number": number, **error.as_dict()})

    def _probe(self) -> None:
        with contextlib.suppress(Exception):
            workers = list(self._fleet.probe().workers)
            self._send(MessageKind.HELLO, {"workers": workers})

    def _send(self, kind: MessageKind, value: Any) -> None:
        self._channel.send(kind, value)
        if self._channel.has_backlog:
            self._wake_pipe.wake()
