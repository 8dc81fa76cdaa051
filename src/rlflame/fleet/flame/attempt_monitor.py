"""Watches the attempts under way: which are silent, which are slow, whether any runs at all."""

from __future__ import annotations

import threading
import traceback
from typing import TYPE_CHECKING

from rlflame.errors import FleetError, RlflameError
from rlflame.fleet.base import FleetEvent

from .attempt import Attempt
from .client import close_quietly

if TYPE_CHECKING:
    from .scheduler import Scheduler

_POLL_INTERVAL_S = 0.5
#: A watched task that is silent for this long is polled.
_SILENCE_S = 20.0
#: If no task runs for this long, the reason is looked for.
_STALLED_S = 4.0


class Monitor:
    """A thread that looks at a scheduler's attempts until it is closed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._board = scheduler.board
        self._reported_at = 0.0
        self._has_reported_stall = False
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="rlflame-monitor", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        try:
            while not self._closing.wait(_POLL_INTERVAL_S):
                self._check_attempts(self._scheduler.clock())
        except RlflameError as error:
            self._board.fail_all(error)
        except Exception as error:  # without it a run could stand still for ever
            self._board.fail_all(
                FleetError(f"The monitor failed: {error!r}.", "", traceback.format_exc())
            )

    def _check_attempts(self, now: float) -> None:
        with self._board.lock:
            attempts, waiting = list(self._board.attempts), len(self._board.jobs)
        for attempt in attempts:
            active_at = max(attempt.created_at, attempt.running_at or 0.0, attempt.polled_at)
            if now - active_at > _SILENCE_S:
                attempt.polled_at = now
                close_quietly(attempt.stream)  # its thread then polls
        if not waiting:
            self._speculate(attempts, now)
        self._check_stall(attempts, now)
        self._scheduler.runner.tidy()

    def _check_stall(self, attempts: list[Attempt], now: float) -> None:
        """Executors may be lost in the middle of a run, and new ones may fail to start."""
        created = [attempt for attempt in attempts if attempt.task]
        if not created or any(attempt.running_at is not None for attempt in attempts):
            self._reported_at = now
            if self._has_reported_stall:
                self._has_reported_stall = False
                self._board.notify(FleetEvent("phase", "", 0, ""))
            return
        oldest = min(created, key=lambda attempt: attempt.created_at)
        waited_s = now - oldest.created_at
        if waited_s < _STALLED_S or now - self._reported_at < _STALLED_S:
            return
        self._reported_at = now
        self._scheduler.runner.poll(oldest)
        if oldest.running_at is None:
            self._has_reported_stall = True
            self._scheduler.starter.handle_stall(waited_s)

    def _speculate(self, attempts: list[Attempt], now: float) -> None:
        """Give stragglers a second executor, where one is free."""
        free = self._scheduler.capacity - len(attempts)
        doubled = {id(job) for attempt in attempts if attempt.speculative for job in attempt.jobs}
        for attempt in attempts:
            purpose = attempt.jobs[0].task.purpose
            limit_s = self._scheduler.statistics.compute_slow_s(purpose, len(attempt.jobs))
            if limit_s is None or free <= 0:
                continue
            if attempt.running_at is None and now - attempt.created_at > limit_s:
                self._scheduler.runner.poll(attempt)
            slow = attempt.running_at is not None and now - attempt.running_at > limit_s
            jobs = [job for job in attempt.jobs if not job.ended and id(job) not in doubled]
            if slow and jobs and not attempt.speculative:
                free -= 1
                self._scheduler.speculate(attempt, jobs)
