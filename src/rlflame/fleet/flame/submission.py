"""Tasks under way together on a cluster, and what to let go of when they are over.

Must not know: connections, how tasks are attended.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from rlflame.errors import RlflameError
from rlflame.fleet.jobs import FleetJob
from rlflame.rollout.spec import Fragment

from .scheduler import Scheduler


class FlameSubmission:
    """Yields each task's fragment once; `over` is called once, whole or not."""

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: list[FleetJob],
        answers: queue.SimpleQueue[Fragment | RlflameError | None],
        on_finish: Callable[[bool], None],
    ) -> None:
        self._scheduler = scheduler
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
            yield outcome

    def cancel(self) -> None:
        if self._waiting:
            self._waiting = 0
            self._scheduler.cancel(self._jobs)
            self._answers.put(None)  # whoever waits in another thread
        self._finish(complete=False)

    def _finish(self, *, complete: bool) -> None:
        if not self._has_finished:
            self._has_finished = True
            self._on_finish(complete)
