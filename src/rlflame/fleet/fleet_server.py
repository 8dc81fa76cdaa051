"""The job's end of a fleet that it lends to one seed: does what the seed asks, in its order.

A thread follows the seed's wishes and one each submission, so that the job itself never waits for
a fleet. Must not know: pipes, other seeds, files.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable

from rlflame.errors import RlflameError
from rlflame.fleet.base import Fleet, Submission
from rlflame.fleet.remote import as_message
from rlflame.rollout import wire
from rlflame.rollout.process.parent_channel import Message

#: Bytes for the seed, from any thread.
BytesSender = Callable[[bytes], None]


class FleetServer:
    """What one seed has on the fleet; `close()` takes all of it back."""

    def __init__(self, fleet: Fleet, send_bytes: BytesSender) -> None:
        self._fleet = fleet
        self._send_bytes = send_bytes
        self._requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._policy_uses: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._submissions: dict[int, Submission] = {}
        self._thread = threading.Thread(target=self._serve, name="rlflame-lending", daemon=True)
        self._thread.start()

    def receive(self, message: Message) -> None:
        self._requests.put(message)

    def close(self) -> None:
        """Without waiting: a seed that is gone wants nothing more."""
        self._requests.put(None)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            self._handle(request)
        with self._lock:
            submissions, self._submissions = [*self._submissions.values()], {}
        for submission in submissions:
            with contextlib.suppress(Exception):
                submission.cancel()
        for name in self._policy_uses.elements():
            with contextlib.suppress(Exception):
                self._fleet.release(name)

    def _handle(self, request: Message) -> None:
        kind = request["what"]
        if kind == "put":
            with contextlib.suppress(RlflameError):  # the submission that needs it will tell
                self._fleet.put(request["arrays"])
                self._policy_uses[request["id"]] += 1
        elif kind == "release":
            if self._policy_uses[request["id"]] > 0:
                self._policy_uses[request["id"]] -= 1
                self._fleet.release(request["id"])
        elif kind == "submit":
            self._submit(request)
        elif kind == "cancel":
            with self._lock:
                submission = self._submissions.pop(request["number"], None)
            if submission is not None:
                submission.cancel()
        elif kind == "probe":
            threading.Thread(target=self._probe, daemon=True).start()

    def _submit(self, request: Message) -> None:
        number = request["number"]
        try:
            submission = self._fleet.submit(list(request["tasks"]))
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
                self._send({"what": "fragment", "number": number, "fragment": fragment})
        except RlflameError as error:
            self._send_error(number, error)
        finally:
            with self._lock:
                self._submissions.pop(number, None)

    def _send_error(self, number: int, error: RlflameError) -> None:
        self._send({"what": "lost", "number": number, **as_message(error)})

    def _probe(self) -> None:
        with contextlib.suppress(Exception):
            workers = list(self._fleet.probe().workers)
            self._send({"what": "report", "workers": workers})

    def _send(self, message: Message) -> None:
        self._send_bytes(wire.encode(message))
