"""Assigns jobs to workers, and delivers the outcomes of jobs.

Threads that share a `JobQueue` hold a lock during every call except `deliver_news`.
"""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from rlflame.errors import RlflameError
from rlflame.rollout.task import Fragment, RolloutTask
from rlflame.rollout.task_batching import split_fragment

from .base import EventKind, FleetEvent, Observer

#: `death` and `hang`: the worker died, or did not answer in time. `stray`: the worker answered, but
#: had not run the job, for example because it had no weights. `loss`: an attempt ended without an
#: answer. `delay`: an attempt that had only this job missed its deadline.
FailureKind = Literal["death", "hang", "stray", "loss", "delay"]
#: The outcomes of a submission's jobs. After a cancellation, None wakes the waiting reader.
AnswerQueue = queue.SimpleQueue[Fragment | RlflameError | None]


@dataclass(eq=False, repr=False)
class FleetJob:
    """A task, its encoded form, and a count of its failures by kind."""

    task: RolloutTask
    payload: bytes
    policy: bytes
    answers: AnswerQueue
    failures: Counter[FailureKind] = field(default_factory=Counter)
    #: Whether the job has ended or was cancelled. Later answers are ignored.
    is_over: bool = False

    @property
    def affinity(self) -> tuple[str, tuple[int, ...]] | None:
        return (self.task.run, self.task.slots) if self.task.unit == "steps" else None


class JobQueue:
    """Holds the jobs that wait for a worker, and the undelivered events of all jobs."""

    def __init__(self) -> None:
        #: Undelivered events, with the outcome of the job if it has ended. The observer receives
        #: the events before the submission receives the outcome.
        self._news: deque[tuple[list[FleetEvent], FleetJob, Fragment | RlflameError | None]] = (
            deque()
        )
        self._waiting: deque[FleetJob] = deque()
        #: The worker that last ran each group of slots and holds their environments.
        self._slot_workers: dict[tuple[str, tuple[int, ...]], object] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, jobs: Iterable[FleetJob]) -> None:
        self._waiting.extend(jobs)

    def take(self, worker: object) -> FleetJob:
        """Take the best job for a worker.

        The best job is one whose environments this worker still holds, or else one whose
        environments no worker holds, or else the last job in the queue.
        """
        own_jobs = (job for job in self._waiting if self._find_owner(job) is worker)
        free_jobs = (job for job in self._waiting if self._find_owner(job) is None)
        job = next(own_jobs, None) or next(free_jobs, None) or self._waiting[-1]
        self._waiting.remove(job)
        if job.affinity is not None:
            self._slot_workers[job.affinity] = worker
        return job

    def _find_owner(self, job: FleetJob) -> object | None:
        return self._slot_workers.get(job.affinity) if job.affinity else None

    def take_similar(self, job: FleetJob, limit: int) -> list[FleetJob]:
        """Take up to `limit` similar jobs from the front of the queue.

        Similar jobs have the same policy and the same purpose as `job`. A job that has failed
        before runs alone, so that it cannot affect other jobs.
        """
        similar: list[FleetJob] = []
        while len(similar) < limit and not job.failures and self._waiting:
            next_job = self._waiting[0]
            if (
                next_job.failures
                or next_job.task.policy_id != job.task.policy_id
                or next_job.task.purpose != job.task.purpose
            ):
                break
            similar.append(self._waiting.popleft())
        return similar

    def mark_running(self, job: FleetJob) -> None:
        """Record that a worker has started the job."""
        if not job.is_over:
            self._add_news(job, "running")

    def requeue(self, job: FleetJob, reason: str) -> None:
        """Put a job back at the front of the queue after a failed attempt."""
        self._add_news(job, "retried", reason)
        self._waiting.appendleft(job)

    def forget_worker(self, worker: object) -> None:
        """Forget a worker that has ended, and the environments that it held."""
        self._slot_workers = {
            slot: owner for slot, owner in self._slot_workers.items() if owner is not worker
        }

    def finish(self, job: FleetJob, outcome: Fragment | RlflameError, worker: str = "") -> None:
        """Record the outcome of a job, unless the job has already ended."""
        if job.is_over:
            return
        job.is_over = True
        if not isinstance(outcome, Fragment):
            self._add_news(job, "lost", outcome=outcome)
            return
        if job.task.purpose == "train":
            self._news.append(([FleetEvent.of_episodes(worker, outcome)], job, None))
        self._add_news(job, "done", outcome=outcome)

    def cancel(self, jobs: Sequence[FleetJob]) -> None:
        for job in jobs:
            if not job.is_over:
                job.is_over = True
                self._add_news(job, "cancelled")
        self._waiting = deque(job for job in self._waiting if not job.is_over)

    def fail_all(self, error: RlflameError, running: Iterable[FleetJob]) -> None:
        """End all waiting and running jobs with the error."""
        for job in (*self._waiting, *running):
            self.finish(job, error)
        self._waiting.clear()

    def _add_news(
        self,
        job: FleetJob,
        kind: EventKind,
        text: str = "",
        outcome: Fragment | RlflameError | None = None,
    ) -> None:
        events = [FleetEvent(kind, job.task.purpose, slot, text) for slot in job.task.slots]
        self._news.append((events, job, outcome))

    def deliver_news(self, lock: AbstractContextManager[Any], observer: Observer) -> None:
        """Deliver events and outcomes.

        `lock` is not held while the observer runs, because the observer may call the fleet.
        """
        while True:
            with lock:
                if not self._news:
                    return
                events, job, outcome = self._news.popleft()
            try:
                for event in events:
                    observer(event)
            finally:
                if outcome is not None:
                    job.answers.put(outcome)


class JobSubmission:
    """A group of submitted tasks that yields the fragment of each slot once.

    `on_finish` is called once, when all jobs have ended or the submission is cancelled.
    """

    def __init__(
        self,
        cancel_jobs: Callable[[Sequence[FleetJob]], None],
        jobs: list[FleetJob],
        answers: AnswerQueue,
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._cancel_jobs = cancel_jobs
        self._jobs = jobs
        self._answers = answers
        self._waiting = len(jobs)
        self._on_finish = on_finish
        self._has_finished = False

    def __iter__(self) -> Iterator[Fragment]:
        while self._waiting:
            outcome = self._answers.get()
            if outcome is None:
                return
            if isinstance(outcome, RlflameError):
                self.cancel()
                raise outcome
            self._waiting -= 1
            if not self._waiting:
                self._finish()
            yield from split_fragment(outcome)

    def cancel(self) -> None:
        if self._waiting:
            self._waiting = 0
            self._cancel_jobs(self._jobs)
            self._answers.put(None)  # wakes a reader in another thread
        self._finish()

    def _finish(self) -> None:
        if not self._has_finished:
            self._has_finished = True
            self._on_finish()
