"""Learner processes, forked from a test, that share memory with it."""

from __future__ import annotations

import os
from collections.abc import Callable

from rlflame.learning.parallel.shared_memory_group import GroupDescriptors, SharedMemoryGroup


def fork_learners(
    size: int, work: Callable[[SharedMemoryGroup], object], deadline_s: float = 60.0, **options
) -> tuple[SharedMemoryGroup, list[int]]:
    """The group of this process with rank 0, and processes that call `work`.

    A process exits with the number that `work` returns, or with 1 if it fails.
    """
    descriptors = GroupDescriptors.create(size)
    pids = []
    for rank in range(1, size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                result = work(SharedMemoryGroup(rank, descriptors, deadline_s=60.0))
                code = result if isinstance(result, int) else 0
            finally:
                os._exit(code)
        pids.append(pid)
    return SharedMemoryGroup(0, descriptors, deadline_s=deadline_s, **options), pids


def collect(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
