"""Tasks under way together on a cluster, and what to let go of when they are over.

Must not know: connections, how tasks are attended.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from rlflame.errors import RlflameError
from rlflame.fleet.jobs import Job
from rlflame.rollout.spec import Fragment

from .scheduler import Desk


class FlameSubmission:
    """Yields each task's fragment once; `over` is called once, whole or not."""

    def __init__(
        self,
        desk: Desk,
        jobs: list[Job],
        answers: queue.SimpleQueue[Fragment | RlflameError | None],
        over: Callable[[bool], None],
    ) -> None:
        self._desk = desk
        self._jobs = jobs
        self._answers = answers
        self._waiting = len(jobs)
        self._over = over
        self._told = False

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
                self._tell(whole=True)
            yield outcome

    def cancel(self) -> None:
        if self._waiting:
            self._waiting = 0
            self._desk.cancel(self._jobs)
            self._answers.put(None)  # whoever waits in another thread
        self._tell(whole=False)

    def _tell(self, *, whole: bool) -> None:
        if not self._told:
            self._told = True
            self._over(whole)
