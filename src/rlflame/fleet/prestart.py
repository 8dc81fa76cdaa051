"""Starts worker processes before the command line is parsed.

A worker spends most of its startup time on imports. Without this module, all processors but one
would be idle until the settings are known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Self

from rlflame.rollout.blas import make_thread_variables
from rlflame.rollout.machine import count_usable_cores
from rlflame.rollout.process.worker_process import WorkerProcess

#: The fleet starts more processes once the number of workers is known.
_MAX_PROCESSES = 2
#: Options that make local workers unlikely, or that may change how workers are started.
_EXCLUDING_OPTIONS = {"-h", "--help", "--dry-run", "--seeds", "--fleet"}
_EXCLUDING_OPTIONS |= {"--env-file", "--allow-module", "--debug", "--config", "--set"}


class PrestartPool:
    """Holds running worker processes until they are taken or the pool is closed."""

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Self:
        """Create a pool for the command-line arguments of `rlflame train`.

        The pool is empty if the arguments suggest that its workers will not be used, and under
        torchrun on every rank except 0.
        """
        is_first_learner = os.environ.get("RANK", "0") == "0"
        # An environment ID such as `module:Id` needs the module's folder in the worker's path.
        is_excluded = any(
            argument.partition("=")[0] in _EXCLUDING_OPTIONS or ":" in argument
            for argument in arguments
        )
        return cls(_MAX_PROCESSES if is_first_learner and not is_excluded else 0)

    def __init__(self, max_processes: int = _MAX_PROCESSES) -> None:
        self._processes: list[WorkerProcess] = []
        # If the machine cannot start processes, the fleet reports the error later.
        with contextlib.suppress(OSError):
            for _ in range(min(_MAX_PROCESSES, count_usable_cores() - 1, max_processes)):
                self._processes.append(WorkerProcess(environment=make_thread_variables(1)))

    def __len__(self) -> int:
        return len(self._processes)

    def take(self, count: int) -> list[WorkerProcess]:
        """Remove and return up to `count` processes, which the caller must end."""
        processes, self._processes = self._processes[:count], self._processes[count:]
        return processes

    def close(self) -> None:
        """End the processes that were not taken."""
        for process in self.take(_MAX_PROCESSES):
            process.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
