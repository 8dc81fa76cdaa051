"""Worker processes that begin to load while it is still being found out what they are for.

Loading is most of what a start takes, and until the settings are known all processors but one have
nothing to do; so they begin with the command itself, before there is anybody to read its words.
Must not know: settings, fleets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Self

from rlflame.rollout.blas_env import limited
from rlflame.rollout.process.worker_process import WorkerProcess

#: More are worth starting only once it is known how many there will be.
_MOST = 2
#: With one of these, workers are not wanted here, or hardly wanted.
_ELSEWHERE = {"-h", "--help", "--dry-run", "--seeds", "--fleet"}
#: With these they must not have begun: of what they may say, workers are told when they begin.
_TOLD = {"--env-file", "--allow-module", "--debug", "--config", "--set"}


def _names_module(word: str) -> bool:
    """Whether a word can be `module:Id`, whose folder workers are told of when they begin."""
    return ":" in word


class HeadStart:
    """Some processes, until they are taken or it is over."""

    @classmethod
    def of_training(cls, words: Sequence[str]) -> Self:
        """For what is typed after `rlflame train`; of learners that torchrun starts, the first one
        has a fleet."""
        first = os.environ.get("RANK", "0") == "0"
        otherwise = any(
            word.partition("=")[0] in _ELSEWHERE | _TOLD or _names_module(word) for word in words
        )
        return cls(_MOST if first and not otherwise else 0)

    def __init__(self, most: int = _MOST) -> None:
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        self._processes: list[WorkerProcess] = []
        # A machine without room for them says so where they are needed.
        with contextlib.suppress(OSError):
            for _ in range(min(_MOST, cores - 1, most)):
                self._processes.append(WorkerProcess(environment=limited(1)))

    def __len__(self) -> int:
        return len(self._processes)

    def take(self, count: int) -> list[WorkerProcess]:
        """At most so many; whoever takes them ends them."""
        taken, self._processes = self._processes[:count], self._processes[count:]
        return taken

    def end(self) -> None:
        """Nobody else is wanted."""
        for process in self.take(_MOST):
            process.retire()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
