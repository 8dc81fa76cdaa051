"""What this machine is and what its processors have spent, for a run's own records.

Must not know: what runs, where the facts are kept.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import Any

from rlflame.rollout import blas
from rlflame.rollout.greeting import greeting

_KEPT = ("host", "processor", "memory_bytes", "system", "libc", "python", "packages")
_TASKS = Path("/proc/self/task")


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
    """Processor seconds of the processes begun by this one; None where the system does not tell."""
    try:
        living = [int(word) for task in _TASKS.iterdir() for word in _children(task)]
    except OSError:
        return None
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(map(_processor_s, living))


def _children(task: Path) -> list[str]:
    """A system without the file raises; a thread that has just ended has no children."""
    try:
        return (task / "children").read_text().split()
    except FileNotFoundError:
        if task.exists():
            raise
        return []


def _processor_s(process: int) -> float:
    """Its own and its ended children's; nothing once it has ended itself."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may hold anything; utime is the twelfth word after it.
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0
