"""Tasks under way together, and their fragments in the order in which they finish."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from rlflame.errors import RlflameError
from rlflame.rollout.task import Fragment
from rlflame.rollout.task_batching import split_fragment

from .job_queue import FleetJob


class JobRunner(Protocol):
    """The part of a fleet that works through jobs."""

    def cancel(self, jobs: Sequence[FleetJob]) -> None: ...


class JobSubmission:
    """Yields the fragment of each slot once.

    `on_finish` is called once, with whether every job was answered.
    """

    def __init__(
        self,
        runner: JobRunner,
        jobs: list[FleetJob],
        answers: queue.SimpleQueue[Fragment | RlflameError | None],
        on_finish: Callable[[bool], None] = lambda complete: None,
    ) -> None:
        self._runner = runner
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
                self._finish(complete=True)
            yield from split_fragment(outcome)

    def cancel(self) -> None:
        if self._waiting:
            self._waiting = 0
            self._runner.cancel(self._jobs)
            self._answers.put(None)  # for an iteration that waits in another thread
        self._finish(complete=False)

    def _finish(self, *, complete: bool) -> None:
        if not self._has_finished:
            self._has_finished = True
            self._on_finish(complete)
