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
Answer = Callable[[bytes], None]


class Lending:
    """What one seed has on the fleet; `close()` takes all of it back."""

    def __init__(self, fleet: Fleet, answer: Answer) -> None:
        self._fleet = fleet
        self._answer = answer
        self._wishes: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._open: dict[int, Submission] = {}
        self._thread = threading.Thread(target=self._serve, name="rlflame-lending", daemon=True)
        self._thread.start()

    def hear(self, message: Message) -> None:
        self._wishes.put(message)

    def close(self) -> None:
        """Without waiting: a seed that is gone wants nothing more."""
        self._wishes.put(None)

    def _serve(self) -> None:
        while (wish := self._wishes.get()) is not None:
            self._do(wish)
        with self._lock:
            open_now, self._open = [*self._open.values()], {}
        for submission in open_now:
            with contextlib.suppress(Exception):
                submission.cancel()
        for name in self._held.elements():
            with contextlib.suppress(Exception):
                self._fleet.release(name)

    def _do(self, wish: Message) -> None:
        what = wish["what"]
        if what == "put":
            with contextlib.suppress(RlflameError):  # the submission that needs it will tell
                self._fleet.put(wish["arrays"])
                self._held[wish["id"]] += 1
        elif what == "release":
            if self._held[wish["id"]] > 0:
                self._held[wish["id"]] -= 1
                self._fleet.release(wish["id"])
        elif what == "submit":
            self._submit(wish)
        elif what == "cancel":
            with self._lock:
                submission = self._open.pop(wish["number"], None)
            if submission is not None:
                submission.cancel()
        elif what == "probe":
            threading.Thread(target=self._probe, daemon=True).start()

    def _submit(self, wish: Message) -> None:
        number = wish["number"]
        try:
            submission = self._fleet.submit(list(wish["tasks"]))
        except RlflameError as error:
            self._lose(number, error)
            return
        with self._lock:
            self._open[number] = submission
        threading.Thread(
            target=self._gather, args=(number, submission), name="rlflame-lent", daemon=True
        ).start()

    def _gather(self, number: int, submission: Submission) -> None:
        try:
            for fragment in submission:
                self._say({"what": "fragment", "number": number, "fragment": fragment})
        except RlflameError as error:
            self._lose(number, error)
        finally:
            with self._lock:
                self._open.pop(number, None)

    def _lose(self, number: int, error: RlflameError) -> None:
        self._say({"what": "lost", "number": number, **as_message(error)})

    def _probe(self) -> None:
        with contextlib.suppress(Exception):
            workers = list(self._fleet.probe().workers)
            self._say({"what": "report", "workers": workers})

    def _say(self, message: Message) -> None:
        self._answer(wire.encode(message))
