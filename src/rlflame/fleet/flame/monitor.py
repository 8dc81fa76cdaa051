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
from rlflame.fleet.jobs import FleetJob

from .attempt import Attempt, AttemptRunner
from .client import close_quietly
from .task_durations import TaskDurations

_POLL_INTERVAL_S = 0.5
#: A watched task that said nothing for so long is asked for.
_SILENCE_S = 20.0
#: Where no task runs for so long, the reason is looked for.
_STALLED_S = 4.0


class SchedulerView(Protocol):
    """A desk as its monitor needs it."""

    def list_attempts(self) -> tuple[list[Attempt], int]:
        """The attempts under way, and how many jobs wait for one."""

    def speculate(self, attempt: Attempt, jobs: list[FleetJob]) -> None:
        """Give jobs of an attempt a second one, unless it has just come to an end."""

    def notify(self, *events: FleetEvent) -> None: ...

    def fail_all(self, error: RlflameError) -> None: ...


class Monitor:
    """A thread that looks until it is closed."""

    def __init__(
        self,
        scheduler: SchedulerView,
        runner: AttemptRunner,
        durations: TaskDurations,
        *,
        capacity: int,
        on_stall: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._durations = durations
        self._capacity = capacity
        #: Asked when nothing runs for a while; raises what ends the run.
        self._on_stall = on_stall
        self._clock = clock
        self._reported_at = 0.0
        self._has_reported_stall = False
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="rlflame-monitor", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        try:
            while not self._closing.wait(_POLL_INTERVAL_S):
                self._check_attempts(self._clock())
        except RlflameError as error:
            self._scheduler.fail_all(error)
        except Exception as error:  # without it a run could stand still for ever
            self._scheduler.fail_all(
                FleetError(f"The monitor failed: {error!r}.", "", traceback.format_exc())
            )

    def _check_attempts(self, now: float) -> None:
        attempts, waiting = self._scheduler.list_attempts()
        for attempt in attempts:
            active_at = max(attempt.created_at, attempt.running_at or 0.0, attempt.polled_at)
            if now - active_at > _SILENCE_S:
                attempt.polled_at = now
                close_quietly(attempt.stream)  # its thread then asks
        if not waiting:
            self._speculate(attempts, now)
        self._check_stall(attempts, now)
        self._runner.tidy()

    def _check_stall(self, attempts: list[Attempt], now: float) -> None:
        """Executors may be lost in the middle of a run, and new ones may fail to start."""
        sent_attempts = [attempt for attempt in attempts if attempt.task]
        if not sent_attempts or any(attempt.running_at is not None for attempt in attempts):
            self._reported_at = now
            if self._has_reported_stall:
                self._has_reported_stall = False
                self._scheduler.notify(FleetEvent("phase", "", 0, ""))
            return
        oldest = min(sent_attempts, key=lambda attempt: attempt.created_at)
        waited_s = now - oldest.created_at
        if waited_s < _STALLED_S or now - self._reported_at < _STALLED_S:
            return
        self._reported_at = now
        self._runner.poll(oldest)
        if oldest.running_at is None:
            self._has_reported_stall = True
            self._on_stall(waited_s)

    def _speculate(self, attempts: list[Attempt], now: float) -> None:
        """Give stragglers a second executor, where one is free."""
        free = self._capacity - len(attempts)
        speculated_ids = {
            id(job) for attempt in attempts if attempt.speculative for job in attempt.jobs
        }
        for attempt in attempts:
            limit = self._durations.compute_slow_s(attempt.jobs[0].task.purpose, len(attempt.jobs))
            if limit is None:
                continue
            if free > 0 and attempt.running_at is None and now - attempt.created_at > limit:
                self._runner.poll(attempt)
            slow = attempt.running_at is not None and now - attempt.running_at > limit
            open_jobs = [
                job for job in attempt.jobs if not job.ended and id(job) not in speculated_ids
            ]
            if free > 0 and slow and open_jobs and not attempt.speculative:
                free -= 1
                self._scheduler.speculate(attempt, open_jobs)
