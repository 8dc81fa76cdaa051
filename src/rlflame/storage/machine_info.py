"""What this machine is and what its processors have spent, for a run's own records.

Must not know: what runs, where the facts are kept.
"""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

from rlflame.rollout import blas
from rlflame.rollout.machine import greeting

_KEPT = ("host", "processor", "memory_bytes", "system", "libc", "python", "packages")
_TASKS = "/proc/self/task"


def describe() -> dict[str, Any]:
    """The facts that a number measured here should be read with."""
    here = greeting()
    return {
        **{name: here[name] for name in _KEPT},
        "cores": os.cpu_count() or 1,
        "usable_cores": blas.usable_cores(),
        "blas": blas.core_name(),
    }


def children_cpu_s() -> float | None:
    """Processor seconds of the processes begun by this one; None where the system does not tell.

    Asked after every iteration, so it reads the system's files without ceremony.
    """
    try:
        living = [word for task in os.listdir(_TASKS) for word in _children(task)]
    except OSError:
        return None
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(map(_processor_s, living))


def _children(task: str) -> list[str]:
    """A system without the file raises; a thread that has just ended has no children."""
    try:
        return _read(f"{_TASKS}/{task}/children").split()
    except FileNotFoundError:
        if os.path.exists(f"{_TASKS}/{task}"):
            raise
        return []


def _processor_s(process: str) -> float:
    """Its own and its ended children's; nothing once it has ended itself."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may hold anything; utime is the twelfth word after it.
        words = _read(f"/proc/{process}/stat").rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _read(path: str) -> str:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16).decode(errors="replace")
    finally:
        os.close(file)
