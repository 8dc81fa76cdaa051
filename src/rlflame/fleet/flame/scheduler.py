"""Schedules jobs: starts attempts, retries failed ones and duplicates slow ones.

Each attempt runs in one thread, so its code is sequential. A monitor thread looks for silent and
slow attempts. The jobs of a failed attempt run again, and return the same fragments.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rlflame.errors import FleetError, RlflameError
from rlflame.fleet.base import FleetEvent
from rlflame.fleet.job_queue import FleetJob
from rlflame.fleet.retry_policy import Retry, classify_answer, count_delay

from . import object_cache
from .attempt import Attempt, AttemptRunner, AttemptTimeout, ClusterUnreachableError
from .task_statistics import TaskStatistics
from .timed_call import format_error

#: The run ends after this many consecutive failures, over more than this time.
_BREAKER_FAILURES = 24
_BREAKER_S = 45.0
#: The limits on concurrent attempts: two per executor (one runs, one waits) and some spare ones,
#: but no more than `_MAX_ATTEMPTS`.
_ATTEMPTS_PER_EXECUTOR, _SPARE_ATTEMPTS, _MAX_ATTEMPTS = 2, 4, 96
_MONITOR_INTERVAL_S = 0.5
#: A task is polled if its watch has reported nothing for this long.
_SILENCE_S = 20.0
#: If no task runs for this long, the scheduler looks for the reason.
_STALLED_S = 4.0


class CircuitBreaker:
    """Counts consecutive failures, and decides when to stop retrying."""

    def __init__(self, reconnect_s: float) -> None:
        self._reconnect_s = reconnect_s
        self._failed_at = 0.0
        self.failures = 0
        #: Whether a server was unreachable during these failures.
        self.saw_outage = False

    def record_answer(self) -> None:
        self.failures, self.saw_outage = 0, False

    def record_failure(self, now: float) -> None:
        self._failed_at = self._failed_at if self.failures else now
        self.failures += 1

    def is_tripped(self, now: float) -> bool:
        return self.failures >= _BREAKER_FAILURES and now - self._failed_at > _BREAKER_S

    def choose_error(self, diagnosis: RlflameError, now: float) -> RlflameError | None:
        """Return the error that ends the run, or None if the cluster may recover."""
        if isinstance(diagnosis, ClusterUnreachableError):
            self.saw_outage = True
            return diagnosis if now - self._failed_at > self._reconnect_s else None
        if self.saw_outage:  # the server is back: failures during the outage no longer count
            self.record_answer()
        return diagnosis if self.failures >= _BREAKER_FAILURES else None


def diagnose_failures(runner: AttemptRunner, reason: str) -> RlflameError:
    """Return an error that says why all recent tasks have failed."""
    client, session = runner.client, runner.starter.wait().session
    prefix = f"{session.application}/shared"
    for server, check in (
        ("session manager", lambda: client.call("list_nodes")),
        ("object cache", lambda: object_cache.put(prefix, b"?")),
    ):
        try:
            check()
        except FleetError as error:
            return ClusterUnreachableError(
                f"The {server} no longer answers: {error.message}",
                "rlflame cluster-check, then rlflame resume",
            )
    nodes = set()
    with contextlib.suppress(FleetError):
        for executor in client.call("list_executors"):
            if executor.status.session_id == session.id:
                nodes.add(executor.spec.node)
    return FleetError(
        f"All recent tasks failed on the cluster, the last one with: {reason}. An executor whose "
        "worker process died fails all its tasks; this run has executors on "
        f"{', '.join(sorted(nodes)) or 'no node'}.",
        "stop the executor manager of that node, wait 40 s, start it again, and run "
        "rlflame resume; rlflame cluster-check names the node",
    )


class Scheduler:
    """Runs jobs on the cluster until `close()`."""

    def __init__(
        self, runner: AttemptRunner, capacity: int, record_worker: Callable[[dict[str, Any]], None]
    ) -> None:
        """`record_worker` is called with every worker's description of itself."""
        self.runner = runner
        self.board = runner.board
        # A group must not miss the deadline of a task.
        self.statistics = TaskStatistics(capacity, runner.runtime.flame.task_deadline_s / 4.0)
        self.breaker = CircuitBreaker(runner.runtime.flame.reconnect_s)
        self._capacity = capacity
        self._record_worker = record_worker
        self._thread_count = self._idle_count = 0
        self._max_threads = min(_MAX_ATTEMPTS, _ATTEMPTS_PER_EXECUTOR * capacity + _SPARE_ATTEMPTS)
        self._stall_checked_at = 0.0
        self._has_reported_stall = False
        threading.Thread(target=self._watch_attempts, name="rlflame-monitor", daemon=True).start()

    def add(self, jobs: Sequence[FleetJob]) -> None:
        with self.board.lock:
            self.board.jobs.add(jobs)
            error = self.board.final_error
            if error is None:
                self._start_threads()
                # Wake no more threads than there are jobs, because every wake-up costs time.
                self.board.lock.notify(len(jobs))
        if error is not None:
            self.board.fail_all(error)

    def close(self) -> None:
        """End all jobs. Daemon threads that still wait for the cluster are abandoned."""
        self.board.fail_all(FleetError("The fleet was closed."))
        self.board.closing.set()
        with self.board.lock:
            self.board.lock.notify_all()
            attempts = list(self.board.attempts)
        for attempt in attempts:
            attempt.close_watch()

    def _start_threads(self) -> None:
        """Start a thread for each job that no idle thread can take, up to the limit."""
        missing = len(self.board.jobs) - self._idle_count
        for _ in range(min(missing, self._max_threads - self._thread_count)):
            self._thread_count += 1
            threading.Thread(target=self._run_attempts, name="rlflame-attempt", daemon=True).start()

    def _run_attempts(self) -> None:
        board = self.board
        while True:
            with board.lock:
                self._idle_count += 1
                while not board.jobs and not board.closing.is_set():
                    board.lock.wait()
                self._idle_count -= 1
                if board.closing.is_set():
                    return
                attempt = Attempt(self._take_group(), time.monotonic())
                board.attempts.append(attempt)
            board.deliver()
            self._run_attempt(attempt)

    def _take_group(self) -> list[FleetJob]:
        """Take the next job and, if jobs are short, similar ones to send with it."""
        jobs = self.board.jobs
        waiting, first = len(jobs), jobs.take(None)
        size = self.statistics.compute_group_size(
            first.task.purpose, waiting, len(self.board.attempts)
        )
        return [first, *jobs.take_similar(first, size - 1)]

    def _run_attempt(self, attempt: Attempt) -> None:
        """Run an attempt. A failure leads to another attempt or to an error."""
        try:
            self._handle_reply(attempt, self.runner.run(attempt))
        except AttemptTimeout as error:
            self._handle_loss(attempt, error.message, is_delay=True)
        except RlflameError as error:
            if isinstance(error, ClusterUnreachableError) or self.runner.starter.session is None:
                self.board.fail_all(error)
            else:
                self._handle_loss(attempt, error.message)
        except Exception as error:
            self._handle_loss(attempt, format_error(error))
        finally:
            with self.board.lock:
                self.board.attempts.remove(attempt)
            self.board.deliver()

    def _handle_reply(self, attempt: Attempt, reply: dict[str, Any]) -> None:
        self._record_worker(reply["worker"])
        retries: list[tuple[FleetJob, Retry]] = []
        for job, answer in zip(attempt.jobs, reply["answers"], strict=True):
            with self.board.lock:
                self.breaker.record_answer()
                if job.is_over:  # another attempt was faster
                    continue
                if answer["kind"] == "result":  # failures say nothing about the duration of a task
                    self.statistics.add(job.task.purpose, float(answer["busy_s"]))
            runtime = self.runner.runtime
            outcome = classify_answer(job, answer, runtime.max_retries, runtime.step_deadline_s)
            if isinstance(outcome, Retry):
                retries.append((job, outcome))
                continue
            with self.board.lock:
                self.board.jobs.finish(job, outcome, str(reply["worker"]["name"]))
        if not retries:
            return
        self.board.deliver()  # deliver the outcomes before the pause
        for job, outcome in retries:
            if outcome.weights_lost:
                self.runner.policies.forget_reference(job.task.policy_id, attempt.weights)
        time.sleep(max(outcome.pause_s for _, outcome in retries))
        self._requeue(attempt, [(job, outcome.reason) for job, outcome in retries])

    def _requeue(self, attempt: Attempt, failures: Sequence[tuple[FleetJob, str]]) -> None:
        board = self.board
        with board.lock:
            # A job that another attempt still runs is requeued only if that attempt also fails.
            attempt.has_failed = True
            active = [job for other in board.attempts if not other.has_failed for job in other.jobs]
            for job, reason in reversed(failures):
                if job not in active and not job.is_over and board.final_error is None:
                    board.jobs.requeue(job, reason)
            self._start_threads()
            board.lock.notify(len(failures))

    def _handle_loss(self, attempt: Attempt, reason: str, *, is_delay: bool = False) -> None:
        """Handle an attempt that failed because of the cluster, not an environment."""
        runtime = self.runner.runtime
        # The duration of a group does not show which of its jobs is slow.
        if is_delay and len(attempt.jobs) == 1:
            with self.board.lock:
                (job,) = attempt.jobs
                error = count_delay(job, runtime.max_retries, runtime.flame.task_deadline_s)
                if error is not None:
                    self.board.jobs.finish(job, error)
        if not attempt.is_awaited or self.board.closing.is_set():
            return
        now = time.monotonic()
        with self.board.lock:
            self.breaker.record_failure(now)
            failures, is_tripped = self.breaker.failures, self.breaker.is_tripped(now)
            for job in attempt.jobs:
                job.failures["loss"] += 1
        if is_tripped:
            diagnosis = diagnose_failures(self.runner, reason)
            with self.board.lock:
                error = self.breaker.choose_error(diagnosis, now)
            if error is not None:
                self.board.fail_all(error)
                return
        # If one executor fails all of its tasks, the pause lets other executors take them.
        time.sleep(min(2.0, 0.05 * 2 ** min(failures, 6)))
        first_reason = reason if failures == 1 else ""
        self._requeue(attempt, [(job, first_reason) for job in attempt.jobs])

    def _watch_attempts(self) -> None:
        try:
            while not self.board.closing.wait(_MONITOR_INTERVAL_S):
                self._check_attempts(time.monotonic())
                self.runner.tidy()
        except RlflameError as error:
            self.board.fail_all(error)
        except Exception as error:  # otherwise the run could hang
            message = f"The monitor failed: {error!r}."
            self.board.fail_all(FleetError(message, "", traceback.format_exc()))

    def _check_attempts(self, now: float) -> None:
        with self.board.lock:
            attempts, waiting = list(self.board.attempts), len(self.board.jobs)
        for attempt in attempts:
            active_at = max(attempt.created_at, attempt.running_at or 0.0, attempt.polled_at)
            if now - active_at > _SILENCE_S:
                attempt.polled_at = now
                attempt.close_watch()  # the attempt's thread then polls
        if not waiting:
            self._speculate(attempts, now)
        self._check_stall(attempts, now)

    def _check_stall(self, attempts: list[Attempt], now: float) -> None:
        """If no task is running, report the reason, such as the loss of executors."""
        submissions = [attempt for attempt in attempts if attempt.task]
        if not submissions or any(attempt.running_at is not None for attempt in attempts):
            self._stall_checked_at = now
            if self._has_reported_stall:
                self._has_reported_stall = False
                self.board.deliver(FleetEvent("phase", "", 0, ""))
            return
        oldest = min(submissions, key=lambda attempt: attempt.created_at)
        if now - max(oldest.created_at, self._stall_checked_at) < _STALLED_S:
            return
        self._stall_checked_at = now
        self.runner.poll(oldest)
        if oldest.running_at is None:
            self._has_reported_stall = True
            self.runner.starter.handle_stall(now - oldest.created_at)

    def _speculate(self, attempts: list[Attempt], now: float) -> None:
        """Start second attempts at slow jobs, as long as executors are free."""
        free = self._capacity - len(attempts)
        twins = {id(job) for attempt in attempts if attempt.speculative for job in attempt.jobs}
        for attempt in attempts:
            purpose = attempt.jobs[0].task.purpose
            limit_s = self.statistics.compute_slow_s(purpose, len(attempt.jobs))
            if limit_s is None or free <= 0:
                continue
            if attempt.task and not attempt.running_at and now - attempt.created_at > limit_s:
                self.runner.poll(attempt)
            is_slow = attempt.running_at is not None and now - attempt.running_at > limit_s
            jobs = [job for job in attempt.jobs if not job.is_over and id(job) not in twins]
            if is_slow and jobs and not attempt.speculative:
                free -= 1
                self._start_second(attempt, jobs)

    def _start_second(self, attempt: Attempt, jobs: list[FleetJob]) -> None:
        """Start a second attempt at the jobs, unless the first one has just ended."""
        second = Attempt(jobs, time.monotonic(), speculative=True)
        with self.board.lock:
            if attempt not in self.board.attempts or attempt.has_failed:
                return
            self.board.attempts.append(second)
        self.board.deliver(
            *(FleetEvent("speculated", job.task.purpose, job.task.slot) for job in jobs)
        )
        threading.Thread(target=self._run_attempt, args=(second,), daemon=True).start()
