"""Sees every job to its one end: hands out attempts, tries again, doubles stragglers, gives up.

One thread attends one attempt, so that an attempt (`errand`) reads from top to bottom; the
`monitor` looks for attempts that stand still; where one is lost another is made, which by design
comes to the same fragment. Must not know: how applications start, what is displayed.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rlflame.errors import FleetError, RlflameError
from rlflame.fleet.base import FleetEvent, Observer, ignore
from rlflame.fleet.jobs import Job, JobQueue, tell

from ..answers import Again, judge, late
from .attempt import Attempt, Away, Errands, Overdue
from .client import Cluster, close_quietly
from .monitor import Monitor
from .object_cache import Litter, Reference
from .overhead import Overhead
from .task_durations import Pace
from .timeouts import said

#: Failures without a single answer between them, over such a time, that end the run.
_BREAKER = 24
_BREAKER_S = 45.0
#: Attempts under way: every executor has one and another in line, and there are some to spare.
_IN_LINE, _SPARE, _MOST = 2, 4, 96


class Desk:
    """Attends jobs until it is closed."""

    def __init__(
        self,
        cluster: Cluster,
        session: Callable[[], Any],
        weights: Callable[[str], Reference],
        forget_weights: Callable[[str, Reference | None], None],
        *,
        capacity: int,
        max_retries: int,
        step_deadline_s: float,
        task_deadline_s: float,
        reconnect_s: float,
        observer: Observer,
        met: Callable[[dict[str, Any]], None],
        overhead: Overhead,
        trouble: Callable[[str], RlflameError],
        stalled: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._forget_weights = forget_weights
        self._capacity = capacity
        self._max_retries = max_retries
        self._step_deadline_s = step_deadline_s
        self._task_deadline_s = task_deadline_s
        self._observer = observer
        self._met = met
        self._trouble = trouble
        self._reconnect_s = reconnect_s
        self._clock = clock
        self._lock = threading.Condition()
        self._jobs = JobQueue()
        self._attempts: list[Attempt] = []
        self._threads: list[threading.Thread] = []
        self._most_threads = min(_MOST, _IN_LINE * capacity + _SPARE)
        self._idle = 0
        self._failures_in_row = 0
        self._failing_since = 0.0
        self._breaker_s = _BREAKER_S
        #: The failures are those of a server that did not answer.
        self._seen_away = False
        self._closing = False
        self._over: RlflameError | None = None
        self._litter = Litter()
        # An observer may ask the fleet for something that is told of in turn.
        self._speaking = threading.RLock()
        self._errands = Errands(
            cluster,
            session,
            weights,
            self._litter.throw,
            self._runs,
            lambda: self._closing,
            task_deadline_s,
            reconnect_s,
            clock,
        )
        self._overhead = overhead
        self.pace = Pace(capacity)
        self._monitor = Monitor(
            self, self._errands, self.pace, capacity=capacity, stalled=stalled, clock=clock
        )

    # From any thread.

    def add(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self._jobs.add(jobs)
            if self._over is not None:
                self._abandon(self._over)
            else:
                self._staff()
                # No more than there is work for: attendants that wake in vain cost time.
                self._lock.notify(len(jobs))
        self._speak()

    def cancel(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self._jobs.cancel(jobs)
        self._speak()

    def end(self, error: RlflameError) -> None:
        """Nothing will be run any more, for this reason."""
        with self._lock:
            self._abandon(error)
        self._speak()

    # For the monitor.

    def standing(self) -> tuple[list[Attempt], int]:
        with self._lock:
            return list(self._attempts), len(self._jobs)

    def double(self, attempt: Attempt, jobs: list[Job]) -> None:
        second = Attempt(jobs, self._clock(), speculative=True)
        with self._lock:
            if attempt not in self._attempts or attempt.over:
                return
            self._attempts.append(second)
        self.tell(*(FleetEvent("speculated", job.task.purpose, job.task.slot) for job in jobs))
        threading.Thread(target=self._see_through, args=(second,), daemon=True).start()

    # Of the cache.

    def throw_away(self, key: str) -> None:
        """Delete an object of the cache, some time soon."""
        self._litter.throw(key)

    def close(self) -> None:
        """Take nothing new and let go of all there is; threads that still wait for the cluster
        are daemons, and cut loose."""
        with self._lock:
            self._closing = True
            self._abandon(FleetError("The fleet was closed."))
            self._lock.notify_all()
            streams = [attempt.stream for attempt in self._attempts]
        self._speak()
        self._monitor.close()
        for stream in streams:
            close_quietly(stream)
        self._litter.close()

    # Threads that attend attempts.

    def _staff(self) -> None:
        """As many attendants as there can be attempts; what waits here can still be grouped."""
        wanted = min(len(self._jobs) - self._idle, self._most_threads - len(self._threads))
        for _ in range(max(0, wanted)):
            thread = threading.Thread(target=self._attend, name="rlflame-attempt", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _attend(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                while not self._jobs and not self._closing:
                    self._lock.wait()
                self._idle -= 1
                if self._closing:
                    return
                attempt = Attempt(self._group(), self._clock())
                self._attempts.append(attempt)
            self._speak()
            self._see_through(attempt)

    def _group(self) -> list[Job]:
        """What goes to the cluster next: a job, and with a short one others of its kind."""
        waiting, first = len(self._jobs), self._jobs.take(None)
        together = self.pace.together(first.task.purpose, waiting, len(self._attempts))
        return [first, *self._jobs.more_like(first, together - 1)]

    def _see_through(self, attempt: Attempt) -> None:
        """From jobs to their answers; whatever goes wrong becomes another attempt, or an error."""
        try:
            self._answered(attempt, self._errands.carry(attempt))
        except Away as error:
            self.end(error)
        except Overdue as error:
            self._late(attempt)
            self._lost(attempt, error.message)
        except RlflameError as error:
            self._lost(attempt, error.message)
        except Exception as error:
            self._lost(attempt, said(error))
        finally:
            with self._lock:
                self._attempts.remove(attempt)
            self._speak()

    def _runs(self, attempt: Attempt) -> None:
        with self._lock:
            for job in attempt.jobs:
                self._jobs.runs(job)
        self._speak()

    # What comes of an attempt.

    def _answered(self, attempt: Attempt, answered: dict[str, Any]) -> None:
        self._met(answered["worker"])
        again: list[tuple[Job, Again]] = []
        for job, answer in zip(attempt.jobs, answered["answers"], strict=True):
            busy_s = float(answer["busy_s"])
            with self._lock:
                self._failures_in_row, self._seen_away = 0, False
                if job.ended:  # somebody else was faster
                    continue
                if answer["kind"] == "result":  # what came to nothing says nothing of the work
                    self.pace.took(job.task.purpose, busy_s)
                    self._overhead.worked(busy_s)
            outcome = judge(job, answer, self._max_retries, self._step_deadline_s)
            if isinstance(outcome, Again):
                again.append((job, outcome))
                continue
            with self._lock:
                self._jobs.end(job, outcome)
        if not again:
            return
        self._speak()  # of those that have come through, before the pause
        for job, outcome in again:
            if outcome.weights_lost:
                self._forget_weights(job.task.policy_id, attempt.weights)
        time.sleep(max(outcome.pause_s for _, outcome in again))
        self._again(attempt, [(job, outcome.reason) for job, outcome in again])

    def _again(self, attempt: Attempt, failed: Sequence[tuple[Job, str]]) -> None:
        with self._lock:
            # Where a second attempt goes on, it is that one's turn; the last of them decides.
            attempt.over = True
            going_on = [job for other in self._attempts if not other.over for job in other.jobs]
            for job, reason in reversed(failed):
                if job not in going_on and not job.ended and self._over is None:
                    self._jobs.again(job, reason)
            self._staff()
            self._lock.notify(len(failed))

    def _late(self, attempt: Attempt) -> None:
        """What one of a group took says nothing of the others."""
        with self._lock:
            for job in attempt.jobs if len(attempt.jobs) == 1 else ():
                if ended := late(job, self._max_retries, self._task_deadline_s):
                    self._jobs.end(job, ended)

    def _lost(self, attempt: Attempt, reason: str) -> None:
        """The cluster, and not an environment, failed the attempt."""
        if not attempt.wanted or self._closing:
            return
        now = self._clock()
        with self._lock:
            if not self._failures_in_row:
                self._failing_since = now
            self._failures_in_row += 1
            failures = self._failures_in_row
            for job in attempt.jobs:
                job.losses += 1
        hopeless = self._hopeless(reason, now)
        if hopeless is not None:
            self.end(hopeless)
            return
        # One executor may be failing all that it is given: leave others time to take something,
        # and that one time to recover.
        time.sleep(min(2.0, 0.05 * 2 ** min(failures, 6)))
        said_once = reason if failures == 1 else ""
        self._again(attempt, [(job, said_once) for job in attempt.jobs])

    def _hopeless(self, reason: str, now: float) -> RlflameError | None:
        """Why there is no point in trying again, after failures without an answer between them."""
        with self._lock:
            since = self._failing_since
            if self._failures_in_row < _BREAKER or now - since <= self._breaker_s:
                return None
        error = self._trouble(reason)
        with self._lock:
            if isinstance(error, Away):  # who is away may come back
                self._seen_away = True
                return error if now - since > self._reconnect_s else None
            if self._seen_away:  # and has: what failed meanwhile counts no more
                self._seen_away, self._failures_in_row = False, 0
            return error if self._failures_in_row >= _BREAKER else None

    def _abandon(self, error: RlflameError) -> None:
        self._over = self._over or error
        self._jobs.abandon(self._over, self._under_way())

    def _under_way(self) -> list[Job]:
        return [job for attempt in self._attempts for job in attempt.jobs]

    def _speak(self) -> None:
        """Tell the observer, one thread at a time and without the lock."""
        with self._speaking:
            try:
                tell(self._jobs, self._lock, self._observer)
            except Exception as error:
                self._deafened(error)

    def tell(self, *events: FleetEvent) -> None:
        with self._speaking:
            try:
                for event in events:
                    self._observer(event)
            except Exception as error:
                self._deafened(error)

    def _deafened(self, error: Exception) -> None:
        """Whoever waits must hear that the observer failed, rather than wait for ever."""
        self._observer = ignore
        self.end(FleetError(f"Telling what happens failed: {error!r}.", "", traceback.format_exc()))
