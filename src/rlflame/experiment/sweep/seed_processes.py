"""The processes of a job's seeds: begun side by side, heard, asked to stop, and never left behind.

Each leads a session of its own, so that Ctrl-C reaches the job alone, which asks them to save; and
each ends when the job's pipe closes, however the job ends. Must not know: what a seed trains,
files, display.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlflame.errors import RlflameError
from rlflame.fleet.base import Fleet
from rlflame.fleet.fleet_server import Lending
from rlflame.fleet.remote import error_of
from rlflame.rollout import blas, wire
from rlflame.rollout.process.parent_channel import Message
from rlflame.rollout.process.worker_main import Kind
from rlflame.rollout.process.worker_process import Garbled, WorkerProcess, how_it_ended
from rlflame.storage.sweep_result import Outcome
from rlflame.training.trainer import Stop

MODULE = "rlflame.experiment.sweep.seed_main"
_LOOK_S = 0.2
_GRACE_S = 5.0
#: More than one descriptor each, and `select` takes a thousand.
MOST_AT_ONCE = 256


class Listener(Protocol):
    """Whoever follows a job."""

    def begun(self, seed: int) -> None: ...

    def event(self, seed: int, event: Mapping[str, Any]) -> None:
        """What a lone run prints with --json."""

    def ended(self, seed: int, outcome: Outcome) -> None: ...


@dataclass(eq=False)
class _Member:
    seed: int
    process: WorkerProcess
    lending: Lending | None = None
    outcome: Outcome | None = None
    asked: bool = False


class _Wake:
    """Threads leave something for the loop, and the loop comes round for it."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._left: deque[tuple[_Member, bytes]] = deque()
        # A number that was closed may be another file's already.
        self._lock = threading.Lock()
        self._closed = False

    def leave(self, member: _Member, payload: bytes) -> None:
        self._left.append((member, payload))
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it will come round anyway
            if not self._closed:
                os.write(self._writer, b"!")

    def take(self) -> list[tuple[_Member, bytes]]:
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 4096)
        return [self._left.popleft() for _ in range(len(self._left))]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.reader)
            os.close(self._writer)


class Crew:
    """`orders` are what each seed's process is told first; `lend` is a fleet for all of them."""

    def __init__(
        self,
        orders: Mapping[int, Message],
        listener: Listener,
        stop: Stop,
        *,
        at_once: int,
        threads: int = 1,
        lend: Fleet | None = None,
        show_output: bool = False,
    ) -> None:
        self._orders = orders
        self._waiting = deque(orders)
        self._listener = listener
        self._stop = stop
        self._at_once = min(at_once, MOST_AT_ONCE)
        self._environment = blas.child_environment(threads)
        self._lend = lend
        self._show_output = show_output
        self._members: list[_Member] = []
        self._wake = _Wake()

    def run(self) -> dict[int, Outcome]:
        """Until all have ended; those that a stop kept from beginning are absent."""
        outcomes: dict[int, Outcome] = {}
        try:
            while self._members or (self._waiting and not self._stop.requested):
                if self._stop.requested:
                    self._ask_to_stop()
                elif len(self._members) < self._at_once and self._waiting:
                    self._begin(self._waiting.popleft())
                    continue
                for member in self._heard():
                    assert member.outcome is not None
                    outcomes[member.seed] = member.outcome
                    self._listener.ended(member.seed, member.outcome)
        finally:
            for member in self._members:
                member.process.retire()
                if member.lending is not None:
                    member.lending.close()
            self._wake.close()
        return outcomes

    def pids(self) -> dict[int, int]:
        """The processes alive now, by seed."""
        return {member.seed: member.process.pid for member in self._members}

    def _begin(self, seed: int) -> None:
        self._listener.begun(seed)
        process = WorkerProcess(
            module=MODULE, environment=self._environment, show_output=self._show_output
        )
        member = _Member(seed, process)
        if self._lend is not None:
            member.lending = Lending(self._lend, lambda payload: self._wake.leave(member, payload))
        self._members.append(member)
        process.send(Kind.TASK, wire.encode(self._orders[seed]))

    def _ask_to_stop(self) -> None:
        for member in self._members:
            if not member.asked:
                member.asked = True
                member.process.send(Kind.TASK, wire.encode({"what": "stop"}))

    def _heard(self) -> Sequence[_Member]:
        """Wait a moment for whatever comes; those that have ended meanwhile."""
        members = self._members
        answers = {member.process.answers: member for member in members}
        full = [member.process.requests for member in members if member.process.backlog]
        ready, _, _ = select.select([*answers, self._wake.reader], full, [], _LOOK_S)
        for member, payload in self._wake.take():
            if member in members:
                member.process.send(Kind.TASK, payload)
        gone = []
        for member in members:
            member.process.flush()
            if member.process.answers in ready and not self._listen(member):
                gone.append(member)
        self._members = [member for member in members if member not in gone]
        return gone

    def _listen(self, member: _Member) -> bool:
        """False once the process has ended."""
        try:
            for _, payload in member.process.receive():
                self._message(member, wire.decode(payload))
        except BlockingIOError:
            pass
        except (EOFError, Garbled, wire.WireError) as error:
            self._bury(member, error)
            return False
        return True

    def _message(self, member: _Member, message: Message) -> None:
        what = message["what"]
        if what == "event":
            self._listener.event(member.seed, json.loads(message["text"]))
        elif what == "ended":
            member.outcome = Outcome("finished" if message["complete"] else "stopped")
        elif what == "failed":
            member.outcome = self._failed(member, message)
        elif what == "broken":
            error = RlflameError(
                "Something went wrong inside rlflame.", "this is a bug", message["traceback"]
            )
            member.outcome = Outcome("failed", error)
        elif member.lending is not None:
            member.lending.hear(message)

    def _failed(self, member: _Member, message: Message) -> Outcome:
        """An end that was asked for before anything had begun is no failure."""
        if member.asked and message["exit_code"] > 128:
            return Outcome("stopped")
        return Outcome("failed", error_of({"kind": "RlflameError", **message}))

    def _bury(self, member: _Member, error: Exception) -> None:
        if member.lending is not None:
            member.lending.close()
        code = member.process.retire(grace_s=_GRACE_S if isinstance(error, EOFError) else 0.0)
        if member.outcome is not None:
            return
        if member.asked and code in (-signal.SIGTERM, -signal.SIGINT):
            member.outcome = Outcome("stopped")
            return
        said = how_it_ended(code) if isinstance(error, EOFError) else f"said {error}"
        said = f"was {said}" if said.startswith("killed") else said
        member.outcome = Outcome(
            "failed", RlflameError(f"Its process {said}.", detail=member.process.printed())
        )
