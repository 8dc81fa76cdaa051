"""Shares a sweep's fleet with the processes that train the sweep's seeds.

`FleetClient` runs in the process of a seed, and `FleetServer` in the process of the sweep.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflame.errors import FleetError, RlflameError, make_error
from rlflame.rollout.process.channel import Channel, Message, MessageKind, WakePipe
from rlflame.rollout.task import Fragment, PolicyArrays, RolloutTask

from .base import ContextManagerMixin, Fleet, Submission, Traffic, check_fragment, make_policy_id

_PROBE_S = 10.0


class FleetClient(ContextManagerMixin):
    """Sends weights and tasks to the sweep's fleet, and receives fragments."""

    #: The sweep, not the seed, waits for the fleet to start.
    ready = True

    def __init__(self, channel: Channel, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._channel = channel
        self._numbers = itertools.count()
        self._submissions: dict[int, _RemoteSubmission] = {}
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
        number = next(self._numbers)
        submission = _RemoteSubmission(self, number, {task.slot: task for task in tasks})
        self._submissions[number] = submission
        self._channel.send(MessageKind.TASK, {"number": number, "tasks": list(tasks)})
        return submission

    def cancel(self, number: int) -> None:
        if self.forget(number):
            self._channel.send(MessageKind.CANCEL, {"number": number})

    def forget(self, number: int) -> bool:
        return self._submissions.pop(number, None) is not None

    def receive(self, message: Message) -> None:
        """Handle a message from the sweep. Only the listening thread calls this method."""
        value = message.value
        if message.kind is MessageKind.HELLO:
            self._reports.put(value)
        elif (submission := self._submissions.get(value["number"])) is not None:
            submission.answers.put((message.kind, value))

    def probe(self) -> list[dict[str, Any]]:
        self._channel.send(MessageKind.PROBE)
        try:
            return [*self._reports.get(timeout=_PROBE_S)["workers"]]
        except queue.Empty:
            raise FleetError("The fleet did not describe its workers in time.") from None

    def read_traffic(self) -> Traffic:
        """Return zero, because a shared fleet's traffic is not measured per seed."""
        return Traffic()

    def close(self) -> None:
        self._closed = True
        for number in [*self._submissions]:
            self.cancel(number)


@dataclass(eq=False)
class _RemoteSubmission:
    """A seed's submission. `tasks` holds the unfinished tasks by slot."""

    fleet: FleetClient
    number: int
    tasks: dict[int, RolloutTask]
    answers: queue.SimpleQueue[tuple[MessageKind, dict[str, Any]]] = field(
        default_factory=queue.SimpleQueue
    )

    def __iter__(self) -> Iterator[Fragment]:
        while self.tasks:
            kind, value = self.answers.get()
            if kind is MessageKind.FAILURE:
                self.tasks.clear()
                self.fleet.forget(self.number)
                raise make_error(value)
            fragment = value["fragment"]
            task = self.tasks.pop(fragment.slot, None)
            if task is None:
                raise FleetError("A fragment arrived twice, or for a slot that was not submitted.")
            if not self.tasks:
                self.fleet.forget(self.number)
            yield check_fragment(task, fragment)

    def cancel(self) -> None:
        self.tasks.clear()
        self.fleet.cancel(self.number)


class FleetServer:
    """Handles the requests of one seed until `close()`.

    One thread handles the requests in order, and one thread per submission collects fragments, so
    the sweep's main thread never waits for the fleet. Answers are sent through `channel`. If its
    pipe is full, `wake_pipe` wakes the thread that waits on the channel, which then sends the rest.
    """

    def __init__(self, fleet: Fleet, channel: Channel, wake_pipe: WakePipe) -> None:
        self._fleet = fleet
        self._channel = channel
        self._wake_pipe = wake_pipe
        self._requests: queue.SimpleQueue[tuple[MessageKind, Any] | None] = queue.SimpleQueue()
        self._policy_uses: Counter[str] = Counter()
        self._submissions: dict[int, Submission] = {}
        self._start_thread(self._serve)

    def receive(self, kind: MessageKind, value: Any) -> None:
        self._requests.put((kind, value))

    def close(self) -> None:
        """Cancel the seed's submissions and release its policies, without waiting."""
        self._requests.put(None)

    def _start_thread(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name="rlflame-lending", daemon=True).start()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            self._handle(*request)
        for submission in self._submissions.copy().values():
            with contextlib.suppress(Exception):
                submission.cancel()
        for name in self._policy_uses.elements():
            with contextlib.suppress(Exception):
                self._fleet.release(name)

    def _handle(self, kind: MessageKind, value: Any) -> None:
        if kind is MessageKind.POLICY:
            with contextlib.suppress(RlflameError):  # a submission with this policy raises instead
                self._fleet.put(value["arrays"])
                self._policy_uses[value["id"]] += 1
        elif kind is MessageKind.FORGET:
            if self._policy_uses[value["id"]] > 0:
                self._policy_uses[value["id"]] -= 1
                self._fleet.release(value["id"])
        elif kind is MessageKind.TASK:
            self._submit(value["number"], list(value["tasks"]))
        elif kind is MessageKind.CANCEL:
            submission = self._submissions.pop(value["number"], None)
            if submission is not None:
                submission.cancel()
        elif kind is MessageKind.PROBE:
            self._start_thread(self._probe)

    def _submit(self, number: int, tasks: list[RolloutTask]) -> None:
        try:
            submission = self._submissions[number] = self._fleet.submit(tasks)
        except RlflameError as error:
            self._send_error(number, error)
        else:
            self._start_thread(self._collect, number, submission)

    def _collect(self, number: int, submission: Submission) -> None:
        try:
            for fragment in submission:
                self._send(MessageKind.RESULT, {"number": number, "fragment": fragment})
        except RlflameError as error:
            self._send_error(number, error)
        finally:
            self._submissions.pop(number, None)

    def _send_error(self, number: int, error: RlflameError) -> None:
        self._send(MessageKind.FAILURE, {"number": number, **error.as_dict()})

    def _probe(self) -> None:
        with contextlib.suppress(Exception):
            self._send(MessageKind.HELLO, {"workers": self._fleet.probe()})

    def _send(self, kind: MessageKind, value: Any) -> None:
        self._channel.send(kind, value)
        if self._channel.has_backlog:
            self._wake_pipe.wake()
