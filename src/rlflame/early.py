"""Worker processes that begin to load while it is still being found out what they are for.

Loading is most of what a start takes, and until the settings are known all processors but one have
nothing to do. Must not know: settings, fleets.
"""

from __future__ import annotations

import contextlib
import os
from typing import Self

from rlflame.rollout.process import WorkerProcess
from rlflame.rollout.threads import limited

#: More are worth starting only once it is known how many there will be.
_MOST = 2


class HeadStart:
    """Some processes, until they are taken or the `with` is over."""

    def __init__(self, most: int | None = None) -> None:
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        self._processes: list[WorkerProcess] = []
        # A machine without room for them says so where they are needed.
        with contextlib.suppress(OSError):
            for _ in range(min(_MOST, cores - 1, most if most is not None else _MOST)):
                self._processes.append(WorkerProcess(environment=limited(1)))

    def take(self, count: int) -> list[WorkerProcess]:
        """At most so many; whoever takes them ends them."""
        taken, self._processes = self._processes[:count], self._processes[count:]
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.take(_MOST):
            process.retire()
