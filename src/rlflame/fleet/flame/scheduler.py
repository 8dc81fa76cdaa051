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
from rlflame.fleet.base import FleetEvent, Observer, ignore_event
from rlflame.fleet.jobs import FleetJob, JobQueue, deliver_notifications

from ..retry_policy import Retry, classify_answer, count_delay
from .attempt import Attempt, AttemptRunner, AttemptTimeout, ClusterUnreachableError
from .client import FlameClient, close_quietly
from .monitor import Monitor
from .object_cache import DeferredDeleter, Reference
from .overhead import ClusterOverhead
from .task_durations import TaskDurations
from .timed_call import format_error

#: Failures without a single answer between them, over such a time, that end the run.
_BREAKER_FAILURES = 24
_BREAKER_S = 45.0
#: Attempts under way: every executor has one and another in line, and there are some to spare.
_ATTEMPTS_PER_EXECUTOR, _SPARE_ATTEMPTS, _MAX_ATTEMPTS = 2, 4, 96


class Scheduler:
    """Attends jobs until it is closed."""

    def __init__(
        self,
        client: FlameClient,
        get_session: Callable[[], Any],
        find_weights: Callable[[str], Reference],
        forget_weights: Callable[[str, Reference | None], None],
        *,
        capacity: int,
        max_retries: int,
        step_deadline_s: float,
        task_deadline_s: float,
        reconnect_s: float,
        observer: Observer,
        on_worker: Callable[[dict[str, Any]], None],
        overhead: ClusterOverhead,
        diagnose: Callable[[str], RlflameError],
        on_stall: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._forget_weights = forget_weights
        self._capacity = capacity
        self._max_retries = max_retries
        self._step_deadline_s = step_deadline_s
        self._task_deadline_s = task_deadline_s
        self._observer = observer
        self._on_worker = on_worker
        self._diagnose = diagnose
        self._reconnect_s = reconnect_s
        self._clock = clock
        self._lock = threading.Condition()
        self._jobs = JobQueue()
        self._attempts: list[Attempt] = []
        self._threads: list[threading.Thread] = []
        self._max_threads = min(_MAX_ATTEMPTS, _ATTEMPTS_PER_EXECUTOR * capacity + _SPARE_ATTEMPTS)
        self._idle_count = 0
        self._failures_in_row = 0
        self._failing_since = 0.0
        self._breaker_s = _BREAKER_S
        #: The failures are those of a server that did not answer.
        self._saw_outage = False
        self._closing = False
        self._final_error: RlflameError | None = None
        self._deleter = DeferredDeleter()
        # An observer may ask the fleet for something that is told of in turn.
        self._notify_lock = threading.RLock()
        self._runner = AttemptRunner(
            client,
            get_session,
            find_weights,
            self._deleter.delete,
            self._mark_running,
            lambda: self._closing,
            task_deadline_s,
            reconnect_s,
            clock,
        )
        self._overhead = overhead
        self.durations = TaskDurations(capacity)
        self._monitor = Monitor(
            self, self._runner, self.durations, capacity=capacity, on_stall=on_stall, clock=clock
        )

    # From any thread.

    def add(self, jobs: Sequence[FleetJob]) -> None:
        with self._lock:
            self._jobs.add(jobs)
            if self._final_error is not None:
                self._fail_jobs(self._final_error)
            else:
                self._start_threads()
                # No more than there is work for: attendants that wake in vain cost time.
                self._lock.notify(len(jobs))
        self._notify_observer()

    def cancel(self, jobs: Sequence[FleetJob]) -> None:
        with self._lock:
            self._jobs.cancel(jobs)
        self._notify_observer()

    def fail_all(self, error: RlflameError) -> None:
        """Nothing will be run any more, for this reason."""
        with self._lock:
            self._fail_jobs(error)
        self._notify_observer()

    # For the monitor.

    def list_attempts(self) -> tuple[list[Attempt], int]:
        with self._lock:
            return list(self._attempts), len(self._jobs)

    def speculate(self, attempt: Attempt, jobs: list[FleetJob]) -> None:
        second = Attempt(jobs, self._clock(), speculative=True)
        with self._lock:
            if attempt not in self._attempts or attempt.has_failed:
                return
            self._attempts.append(second)
        self.notify(*(FleetEvent("speculated", job.task.purpose, job.task.slot) for job in jobs))
        threading.Thread(target=self._run_attempt, args=(second,), daemon=True).start()

    # Of the cache.

    def delete_object(self, key: str) -> None:
        """Delete an object of the cache, some time soon."""
        self._deleter.delete(key)

    def close(self) -> None:
        """Take nothing new and let go of all there is; threads that still wait for the cluster
        are daemons, and cut loose."""
        with self._lock:
            self._closing = True
            self._fail_jobs(FleetError("The fleet was closed."))
            self._lock.notify_all()
            streams = [attempt.stream for attempt in self._attempts]
        self._notify_observer()
        self._monitor.close()
        for stream in streams:
            close_quietly(stream)
        self._deleter.close()

    # Threads that attend attempts.

    def _start_threads(self) -> None:
        """As many attendants as there can be attempts; what waits here can still be grouped."""
        count = min(len(self._jobs) - self._idle_count, self._max_threads - len(self._threads))
        for _ in range(max(0, count)):
            thread = threading.Thread(
                target=self._run_attempts, name="rlflame-attempt", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _run_attempts(self) -> None:
        while True:
            with self._lock:
                self._idle_count += 1
                while not self._jobs and not self._closing:
                    self._lock.wait()
                self._idle_count -= 1
                if self._closing:
                    return
                attempt = Attempt(self._take_group(), self._clock())
                self._attempts.append(attempt)
            self._notify_observer()
            self._run_attempt(attempt)

    def _take_group(self) -> list[FleetJob]:
        """What goes to the cluster next: a job, and with a short one others of its kind."""
        waiting, first = len(self._jobs), self._jobs.take(None)
        group_size = self.durations.compute_group_size(
            first.task.purpose, waiting, len(self._attempts)
        )
        return [first, *self._jobs.take_similar(first, group_size - 1)]

    def _run_attempt(self, attempt: Attempt) -> None:
        """From jobs to their answers; whatever goes wrong becomes another attempt, or an error."""
        try:
            self._handle_reply(attempt, self._runner.run(attempt))
        except ClusterUnreachableError as error:
            self.fail_all(error)
        except AttemptTimeout as error:
            self._count_delays(attempt)
            self._handle_loss(attempt, error.message)
        except RlflameError as error:
            self._handle_loss(attempt, error.message)
        except Exception as error:
            self._handle_loss(attempt, format_error(error))
        finally:
            with self._lock:
                self._attempts.remove(attempt)
            self._notify_observer()

    def _mark_running(self, attempt: Attempt) -> None:
        with self._lock:
            for job in attempt.jobs:
                self._jobs.mark_running(job)
        self._notify_observer()

    # What comes of an attempt.

    def _handle_reply(self, attempt: Attempt, reply: dict[str, Any]) -> None:
        self._on_worker(reply["worker"])
        retries: list[tuple[FleetJob, Retry]] = []
        for job, answer in zip(attempt.jobs, reply["answers"], strict=True):
            busy_s = float(answer["busy_s"])
            with self._lock:
                self._failures_in_row, self._saw_outage = 0, False
                if job.ended:  # somebody else was faster
                    continue
                if answer["kind"] == "result":  # what came to nothing says nothing of the work
                    self.durations.add(job.task.purpose, busy_s)
                    self._overhead.add_task(busy_s)
            outcome = classify_answer(job, answer, self._max_retries, self._step_deadline_s)
            if isinstance(outcome, Retry):
                retries.append((job, outcome))
                continue
            with self._lock:
                self._jobs.finish(job, outcome)
        if not retries:
            return
        self._notify_observer()  # of those that have come through, before the pause
        for job, outcome in retries:
            if outcome.weights_lost:
                self._forget_weights(job.task.policy_id, attempt.weights)
        time.sleep(max(outcome.pause_s for _, outcome in retries))
        self._requeue(attempt, [(job, outcome.reason) for job, outcome in retries])

    def _requeue(self, attempt: Attempt, failed: Sequence[tuple[FleetJob, str]]) -> None:
        with self._lock:
            # Where a second attempt goes on, it is that one's turn; the last of them decides.
            attempt.has_failed = True
            other_jobs = [
                job for other in self._attempts if not other.has_failed for job in other.jobs
            ]
            for job, reason in reversed(failed):
                if job not in other_jobs and not job.ended and self._final_error is None:
                    self._jobs.requeue(job, reason)
            self._start_threads()
            self._lock.notify(len(failed))

    def _count_delays(self, attempt: Attempt) -> None:
        """What one of a group took says nothing of the others."""
        with self._lock:
            for job in attempt.jobs if len(attempt.jobs) == 1 else ():
                if error := count_delay(job, self._max_retries, self._task_deadline_s):
                    self._jobs.finish(job, error)

    def _handle_loss(self, attempt: Attempt, reason: str) -> None:
        """The cluster, and not an environment, failed the attempt."""
        if not attempt.is_awaited or self._closing:
            return
        now = self._clock()
        with self._lock:
            if not self._failures_in_row:
                self._failing_since = now
            self._failures_in_row += 1
            failures = self._failures_in_row
            for job in attempt.jobs:
                job.failures["loss"] += 1
        final_error = self._find_final_error(reason, now)
        if final_error is not None:
            self.fail_all(final_error)
            return
        # One executor may be failing all that it is given: leave others time to take something,
        # and that one time to recover.
        time.sleep(min(2.0, 0.05 * 2 ** min(failures, 6)))
        first_reason = reason if failures == 1 else ""
        self._requeue(attempt, [(job, first_reason) for job in attempt.jobs])

    def _find_final_error(self, reason: str, now: float) -> RlflameError | None:
        """Why there is no point in trying again, after failures without an answer between them."""
        with self._lock:
            since = self._failing_since
            if self._failures_in_row < _BREAKER_FAILURES or now - since <= self._breaker_s:
                return None
        error = self._diagnose(reason)
        with self._lock:
            if isinstance(error, ClusterUnreachableError):  # who is away may come back
                self._saw_outage = True
                return error if now - since > self._reconnect_s else None
            if self._saw_outage:  # and has: what failed meanwhile counts no more
                self._saw_outage, self._failures_in_row = False, 0
            return error if self._failures_in_row >= _BREAKER_FAILURES else None

    def _fail_jobs(self, error: RlflameError) -> None:
        self._final_error = self._final_error or error
        self._jobs.fail_all(self._final_error, self._list_running_jobs())

    def _list_running_jobs(self) -> list[FleetJob]:
        return [job for attempt in self._attempts for job in attempt.jobs]

    def _notify_observer(self) -> None:
        """Tell the observer, one thread at a time and without the lock."""
        with self._notify_lock:
            try:
                deliver_notifications(self._jobs, self._lock, self._observer)
            except Exception as error:
                self._handle_observer_failure(error)

    def notify(self, *events: FleetEvent) -> None:
        with self._notify_lock:
            try:
                for event in events:
                    self._observer(event)
            except Exception as error:
                self._handle_observer_failure(error)

    def _handle_observer_failure(self, error: Exception) -> None:
        """Whoever waits must hear that the observer failed, rather than wait for ever."""
        self._observer = ignore_event
        self.fail_all(
            FleetError(f"Telling what happens failed: {error!r}.", "", traceback.format_exc())
        )
