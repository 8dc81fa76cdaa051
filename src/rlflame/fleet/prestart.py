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

from rlflame.rollout.blas import make_thread_variables
from rlflame.rollout.process.worker_process import WorkerProcess

#: More are worth starting only once it is known how many there will be.
_MAX_PROCESSES = 2
#: With one of these, workers are not wanted here, or hardly wanted.
_OTHER_FLEET_OPTIONS = {"-h", "--help", "--dry-run", "--seeds", "--fleet"}
#: With these they must not have begun: of what they may say, workers are told when they begin.
_PROCESS_OPTIONS = {"--env-file", "--allow-module", "--debug", "--config", "--set"}


def _is_module_name(argument: str) -> bool:
    """Whether a word can be `module:Id`, whose folder workers are told of when they begin."""
    return ":" in argument


class PrestartPool:
    """Some processes, until they are taken or it is over."""

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Self:
        """For what is typed after `rlflame train`; of learners that torchrun starts, the first one
        has a fleet."""
        is_first_learner = os.environ.get("RANK", "0") == "0"
        is_excluded = any(
            argument.partition("=")[0] in _OTHER_FLEET_OPTIONS | _PROCESS_OPTIONS
            or _is_module_name(argument)
            for argument in arguments
        )
        return cls(_MAX_PROCESSES if is_first_learner and not is_excluded else 0)

    def __init__(self, max_processes: int = _MAX_PROCESSES) -> None:
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        self._processes: list[WorkerProcess] = []
        # A machine without room for them says so where they are needed.
        with contextlib.suppress(OSError):
            for _ in range(min(_MAX_PROCESSES, cores - 1, max_processes)):
                self._processes.append(WorkerProcess(environment=make_thread_variables(1)))

    def __len__(self) -> int:
        return len(self._processes)

    def take(self, count: int) -> list[WorkerProcess]:
        """At most so many; whoever takes them ends them."""
        processes, self._processes = self._processes[:count], self._processes[count:]
        return processes

    def close(self) -> None:
        """Nobody else is wanted."""
        for process in self.take(_MAX_PROCESSES):
            process.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
