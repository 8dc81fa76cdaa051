"""How much memory this process can still have."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

#: What a process that trains takes besides a replay: interpreter, numpy, environments, networks.
PROCESS_BYTES = 150_000_000
#: What it reserves besides, once it runs, of the addresses that it may have: stacks of threads,
#: arenas, buffers of BLAS, at least and at most. Little of that is ever touched.
RESERVED_BYTES = (250_000_000, 1_200_000_000)
_ROOT = Path("/")


def measure_available_bytes(root: Path = _ROOT) -> int:
    """What the machine has left, or its container where that is less."""
    return max(0, min([_read_machine_bytes(root), *_read_cgroup_limits(root)]))


def measure_usable_bytes(root: Path = _ROOT) -> tuple[int, int]:
    """What one replay can take in this process beside all else that it will need: beyond the first
    it cannot run, up to the second it can."""
    shared, address_limits = (
        measure_available_bytes(root) - PROCESS_BYTES,
        [*_read_address_limits(root)],
    )
    maximum, safe = (
        min([shared, *(limit_bytes - reserve_bytes for limit_bytes in address_limits)])
        for reserve_bytes in RESERVED_BYTES
    )
    return max(0, maximum), max(0, safe)


def _read_address_limits(root: Path) -> Iterator[int]:
    """Of `ulimit -v`, what this process has not taken yet."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int((root / "proc/self/statm").read_text().split()[0])
            yield limit - pages * resource.getpagesize()


def _read_machine_bytes(root: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_cgroup_limits(root: Path) -> Iterator[int]:
    """What each control group that this process is in has left, of either version."""
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
    """Of a group and all above it; inside a container the path may be one of outside."""
    limit, usage, cached = names
    directory = base / path.lstrip("/")
    for folder in (directory, *directory.parents):
        with contextlib.suppress(OSError, ValueError):
            # A group without a limit says `max`, or has no such file.
            free_bytes = int((folder / limit).read_text()) - int((folder / usage).read_text())
            yield free_bytes + _read_cached_bytes(folder / "memory.stat", cached)
        if folder == base:
            return


def _read_cached_bytes(file: Path, name: str) -> int:
    """Pages of files count as used, and are given up when they are needed."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
