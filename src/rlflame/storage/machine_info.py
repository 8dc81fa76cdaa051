"""What this machine is and what its processors have spent, for a run's own records.

Must not know: what runs, where the facts are kept.
"""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

from rlflame.rollout import blas
from rlflame.rollout.machine import count_usable_cores, describe_host

_FACT_NAMES = ("host", "processor", "memory_bytes", "system", "libc", "python", "packages")
_TASKS_PATH = "/proc/self/task"


def describe_machine() -> dict[str, Any]:
    """The facts that a number measured here should be read with."""
    facts = describe_host()
    return {
        **{name: facts[name] for name in _FACT_NAMES},
        "cores": os.cpu_count() or 1,
        "usable_cores": count_usable_cores(),
        "blas": blas.read_core_name(),
    }


def read_children_cpu_s() -> float | None:
    """Processor seconds of the processes begun by this one; None where the system does not tell.

    Asked after every iteration, so it reads the system's files without ceremony.
    """
    try:
        pids = [word for task in os.listdir(_TASKS_PATH) for word in _list_children(task)]
    except OSError:
        return None
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + sum(map(_read_cpu_s, pids))


def _list_children(task: str) -> list[str]:
    """A system without the file raises; a thread that has just ended has no children."""
    try:
        return _read_file(f"{_TASKS_PATH}/{task}/children").split()
    except FileNotFoundError:
        if os.path.exists(f"{_TASKS_PATH}/{task}"):
            raise
        return []


def _read_cpu_s(process: str) -> float:
    """Its own and its ended children's; nothing once it has ended itself."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may hold anything; utime is the twelfth word after it.
        fields = _read_file(f"/proc/{process}/stat").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _read_file(path: str) -> str:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16).decode(errors="replace")
    finally:
        os.close(file)
