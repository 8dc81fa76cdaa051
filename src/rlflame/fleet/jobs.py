"""Tasks on their way: who should run them next, and the one end that each of them comes to.

Must not know: processes, pipes, threads; whoever shares a JobQueue between threads locks it.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rlflame.errors import FleetError, RlflameError
from rlflame.rollout.spec import Fragment, RolloutFailure, RolloutTask, TaskPosition

from .base import EventKind, FleetEvent, Observer, make_environment_failure


@dataclass(eq=False, repr=False)
class FleetJob:
    """A task, ready to be sent, and everything that happened to it."""

    task: RolloutTask
    payload: bytes
    policy: bytes
    answers: queue.SimpleQueue[Fragment | RlflameError | None]
    deaths: int = 0
    hangs: int = 0
    #: Answers that were no fault of its environment and no death either.
    strays: int = 0
    #: Attempts that came to no answer at all, and those of them that took it alone too long.
    losses: int = 0
    delays: int = 0
    #: Answered or cancelled: whatever is still heard of it is of no interest.
    ended: bool = False

    @property
    def has_failures(self) -> bool:
        """It has cost a worker before, and may again."""
        return bool(self.deaths or self.hangs or self.strays or self.losses)

    @property
    def affinity(self) -> tuple[str, tuple[int, ...]] | None:
        return (self.task.run, self.task.slots) if self.task.unit == "steps" else None


@dataclass(frozen=True, slots=True)
class Notification:
    """Events to be told, and then, if they are an end, the outcome to be handed over."""

    events: tuple[FleetEvent, ...]
    job: FleetJob
    outcome: Fragment | RlflameError | None = None

    def deliver(self) -> None:
        if self.outcome is not None:
            self.job.answers.put(self.outcome)


class JobQueue:
    """Jobs that wait for a worker, and the news of all of them."""

    def __init__(self) -> None:
        #: In this order an observer hears of a task's end before anybody can act on it.
        self.notifications: deque[Notification] = deque()
        self._waiting: deque[FleetJob] = deque()
        #: Which worker ran a slot last, and so holds its environments.
        self._slot_workers: dict[tuple[str, tuple[int, ...]], object] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, jobs: Iterable[FleetJob]) -> None:
        self._waiting.extend(jobs)

    def take(self, worker: object) -> FleetJob:
        """The best job for a worker: one of its own slots, else nobody's, else the last."""
        unassigned = None
        for job in self._waiting:
            owner = self._slot_workers.get(job.affinity) if job.affinity else None
            if owner is worker:
                break
            if unassigned is None and owner is None:
                unassigned = job
        else:
            job = unassigned or self._waiting[-1]
        self._waiting.remove(job)
        if job.affinity is not None:
            self._slot_workers[job.affinity] = worker
        return job

    def take_similar(self, job: FleetJob, limit: int) -> list[FleetJob]:
        """Up to so many of those next in line that want the same policy for the same purpose.

        One that something has happened to stays alone, where it can harm no other.
        """
        similar: list[FleetJob] = []
        while len(similar) < limit and not job.has_failures and self._waiting:
            next_job = self._waiting[0]
            if (
                next_job.has_failures
                or next_job.task.policy_id != job.task.policy_id
                or next_job.task.purpose != job.task.purpose
            ):
                break
            similar.append(self._waiting.popleft())
        return similar

    def mark_running(self, job: FleetJob) -> None:
        """A worker has begun with it."""
        if not job.ended:
            self._add_notification(job, "running")

    def requeue(self, job: FleetJob, reason: str) -> None:
        """Its worker was lost: another one comes to the same result."""
        self._add_notification(job, "retried", reason)
        self._waiting.appendleft(job)

    def forget_worker(self, worker: object) -> None:
        """This worker and the environments it held are no more."""
        self._slot_workers = {
            slot: owner for slot, owner in self._slot_workers.items() if owner is not worker
        }

    def finish(self, job: FleetJob, outcome: Fragment | RlflameError) -> None:
        """A job ends once."""
        if not job.ended:
            job.ended = True
            self._add_notification(
                job, "done" if isinstance(outcome, Fragment) else "lost", outcome=outcome
            )

    def cancel(self, jobs: Sequence[FleetJob]) -> None:
        for job in jobs:
            if not job.ended:
                job.ended = True
                self._add_notification(job, "cancelled")
        self._waiting = deque(job for job in self._waiting if not job.ended)

    def fail_all(self, error: RlflameError, running: Iterable[FleetJob]) -> None:
        """Nothing will be run any more: tell everybody who waits."""
        for job in (*self._waiting, *running):
            self.finish(job, error)
        self._waiting.clear()

    def _add_notification(
        self,
        job: FleetJob,
        kind: EventKind,
        text: str = "",
        outcome: Fragment | RlflameError | None = None,
    ) -> None:
        purpose = job.task.purpose
        events = tuple(FleetEvent(kind, purpose, slot, text) for slot in job.task.slots)
        self.notifications.append(Notification(events, job, outcome))


def deliver_notifications(
    jobs: JobQueue, lock: AbstractContextManager[Any], observer: Observer
) -> None:
    """Pass the news on, without the lock: an observer may ask the fleet something in turn."""
    while True:
        with lock:
            if not jobs.notifications:
                return
            notification = jobs.notifications.popleft()
        try:
            for event in notification.events:
                observer(event)
        finally:
            notification.deliver()


def make_hang_error(
    task: RolloutTask, position: TaskPosition | None, deadline_s: float, printed: str
) -> RlflameError:
    """The error of an environment that does not come back."""
    slot, row, seed, step = position or (task.slot, 0, 0, 0)
    message = f"environment {task.env.id} did not answer within {deadline_s:g} s"
    failure = RolloutFailure(task.iteration, slot, row, seed, step, message, "", printed)
    hint = "if its steps really take that long: --set runtime.step_deadline_s=600"
    return make_environment_failure(task, failure, hint)


def make_death_error(
    job: FleetJob, position: TaskPosition | None, cause: str, printed: str
) -> RlflameError:
    """The error of a task that took too many workers with it."""
    location = " (near slot {}, row {}, seed {}, step {})".format(*position) if position else ""
    return FleetError(
        f"Worker processes died {job.deaths} times over {_format_slots(job.task)} of iteration "
        f"{job.task.iteration}, the last one {cause}{location}.",
        "signal 9 often means that memory ran out: try fewer --workers"
        if "signal 9" in cause
        else "run it with --fleet inline to see it happen in this process",
        printed,
    )


def make_broken_worker_error(task: RolloutTask, trace: str, printed: str) -> RlflameError:
    """The error of a worker that met something it does not understand."""
    return FleetError(
        f"A worker could not run {_format_slots(task)}: {trace.strip().splitlines()[-1]}.",
        "this is a fault in rlflame, not in the environment",
        trace + printed,
    )


def _format_slots(task: RolloutTask) -> str:
    if not task.extra_slots:
        return f"slot {task.slot}"
    return f"slots {', '.join(map(str, task.slots[:-1]))} and {task.slots[-1]}"
