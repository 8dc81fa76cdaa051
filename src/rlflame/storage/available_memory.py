"""Measures how much memory this process can still use."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

#: The memory that a training process uses for Python, numpy, environments and networks, without a
#: replay buffer.
PROCESS_BYTES = 150_000_000
#: The minimum address space that a process reserves for thread stacks, malloc arenas and BLAS
#: buffers. The process uses little of it.
RESERVED_BYTES = 250_000_000
_ROOT = Path("/")


def measure_available_bytes(root: Path = _ROOT) -> int:
    """Return the free memory of this machine or, if less, of this container."""
    machine_bytes = _read_number(root / "proc/meminfo", "MemAvailable:") * 1024
    machine_bytes = machine_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([machine_bytes, *_read_cgroup_limits(root)]))


def measure_usable_bytes(root: Path = _ROOT) -> int:
    """Return the memory left for large arrays, such as a replay buffer."""
    free_bytes = measure_available_bytes(root) - PROCESS_BYTES
    return int(max(0, min(free_bytes, _read_address_bytes(root) - RESERVED_BYTES)))


def _read_address_bytes(root: Path) -> float:
    """Return the address space that `ulimit -v` leaves, or infinity."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int((root / "proc/self/statm").read_text().split()[0])
            return limit - pages * resource.getpagesize()
    return math.inf


def _read_cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the free memory of each control group (v1 or v2) of this process."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            yield from _read_cgroup_hierarchy(root / "sys/fs/cgroup", path, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _read_cgroup_hierarchy(root / "sys/fs/cgroup/memory", path, names)


def _read_cgroup_hierarchy(base: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield the free memory of a control group and of its visible parents."""
    limit, usage, cache = names
    directory = base / path.lstrip("/")
    for folder in (directory, *directory.parents):
        with contextlib.suppress(OSError, ValueError):
            # Without a limit, the file contains `max` or does not exist.
            free_bytes = int((folder / limit).read_text()) - int((folder / usage).read_text())
            # The page cache counts as used, but the kernel reclaims it when needed.
            yield free_bytes + _read_number(folder / "memory.stat", cache)
        if folder == base:
            return


def _read_number(file: Path, name: str) -> int:
    """Return the number after a name in a statistics file, or 0 if missing."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
