"""A sweep's end of the fleet that it shares with one seed: handles the seed's requests in order.

One thread handles the requests and one each submission, so that the sweep never waits for a fleet.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from typing import Any

from rlflame.errors import RlflameError
from rlflame.fleet.base import Fleet, Submission
from rlflame.rollout.process.channel import Channel, MessageKind, WakePipe
from rlflame.rollout.task import RolloutTask


class FleetServer:
    """What one seed has on the fleet; `close()` takes all of it back.

    Answers go into the seed's `channel`. The thread that waits for the channel is woken for what
    the pipe did not take at once.
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
