"""Looks at the attempts under way: which fell silent, which are slow, whether any runs at all.

Must not know: how attempts are made, what comes of them.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from rlflame.errors import FleetError, RlflameError
from rlflame.fleet.base import FleetEvent
from rlflame.fleet.jobs import Job

from .attempt import Attempt, Errands
from .client import close_quietly
from .task_durations import Pace

_LOOK_EVERY_S = 0.5
#: A watched task that said nothing for so long is asked for.
_SILENCE_S = 20.0
#: Where no task runs for so long, the reason is looked for.
_STALLED_S = 4.0


class Watched(Protocol):
    """A desk as its monitor needs it."""

    def standing(self) -> tuple[list[Attempt], int]:
        """The attempts under way, and how many jobs wait for one."""

    def double(self, attempt: Attempt, jobs: list[Job]) -> None:
        """Give jobs of an attempt a second one, unless it has just come to an end."""

    def tell(self, *events: FleetEvent) -> None: ...

    def end(self, error: RlflameError) -> None: ...


class Monitor:
    """A thread that looks until it is closed."""

    def __init__(
        self,
        desk: Watched,
        errands: Errands,
        pace: Pace,
        *,
        capacity: int,
        stalled: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._desk = desk
        self._errands = errands
        self._pace = pace
        self._capacity = capacity
        #: Asked when nothing runs for a while; raises what ends the run.
        self._stalled = stalled
        self._clock = clock
        self._told_at = 0.0
        self._said_stalled = False
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="rlflame-monitor", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        try:
            while not self._closing.wait(_LOOK_EVERY_S):
                self._look(self._clock())
        except RlflameError as error:
            self._desk.end(error)
        except Exception as error:  # without it a run could stand still for ever
            self._desk.end(
                FleetError(f"The monitor failed: {error!r}.", "", traceback.format_exc())
            )

    def _look(self, now: float) -> None:
        attempts, waiting = self._desk.standing()
        for attempt in attempts:
            heard_at = max(attempt.created_at, attempt.running_at or 0.0, attempt.asked_at)
            if now - heard_at > _SILENCE_S:
                attempt.asked_at = now
                close_quietly(attempt.stream)  # its thread then asks
        if not waiting:
            self._speculate(attempts, now)
        self._look_at_start(attempts, now)
        self._errands.tidy()

    def _look_at_start(self, attempts: list[Attempt], now: float) -> None:
        """Executors may be lost in the middle of a run, and new ones may fail to start."""
        sent = [attempt for attempt in attempts if attempt.task]
        if not sent or any(attempt.running_at is not None for attempt in attempts):
            self._told_at = now
            if self._said_stalled:
                self._said_stalled = False
                self._desk.tell(FleetEvent("phase", "", 0, ""))
            return
        oldest = min(sent, key=lambda attempt: attempt.created_at)
        waited_s = now - oldest.created_at
        if waited_s < _STALLED_S or now - self._told_at < _STALLED_S:
            return
        self._told_at = now
        self._errands.look(oldest)
        if oldest.running_at is None:
            self._said_stalled = True
            self._stalled(waited_s)

    def _speculate(self, attempts: list[Attempt], now: float) -> None:
        """Give stragglers a second executor, where one is free."""
        free = self._capacity - len(attempts)
        doubled = {id(job) for attempt in attempts if attempt.speculative for job in attempt.jobs}
        for attempt in attempts:
            limit = self._pace.slow_s(attempt.jobs[0].task.purpose, len(attempt.jobs))
            if limit is None:
                continue
            if free > 0 and attempt.running_at is None and now - attempt.created_at > limit:
                self._errands.look(attempt)
            slow = attempt.running_at is not None and now - attempt.running_at > limit
            wanted = [job for job in attempt.jobs if not job.ended and id(job) not in doubled]
            if free > 0 and slow and wanted and not attempt.speculative:
                free -= 1
                self._desk.double(attempt, wanted)
