"""Describes the machine of a benchmark and measures the load of other programs."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rlflame.fleet.factory import is_remote
from rlflame.rollout.blas import THREAD_VARIABLES
from rlflame.rollout.machine import count_usable_cores, describe_machine
from rlflame.terminal_text import format_size

#: A machine is busy if more than this share of its usable processors is at work.
_BUSY_SHARE = 0.25
_SAMPLE_S = 0.5
_STAT = Path("/proc/stat")


class LoadMonitor:
    """Measures the load of programs other than this process and its children."""

    def __init__(self, fleets: Collection[str]) -> None:
        self._machine, self._at_work = describe_machine(), count_busy_processors()
        # Flame's executors are not children, so the load of other programs is unknown.
        self._start = None if any(map(is_remote, fleets)) else _read_counters()

    def describe(self) -> dict[str, Any]:
        """Describe the machine and its load.

        The load of other programs is exact only after all child processes have ended.
        """
        load = _compute_load(self._start, _read_counters())
        others = max(0.0, load[0] - load[1]) if load else None
        busiest = max(value for value in (self._at_work, others, 0.0) if value is not None)
        return {
            "machine": self._machine,
            "threads": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
            # Busy processors before the benchmark, and those busy with other programs during it.
            "at_work": self._at_work,
            "others": others,
            "busy": busiest > max(0.5, _BUSY_SHARE * count_usable_cores()),
        }


def format_conditions(facts: dict[str, Any]) -> list[str]:
    """Return sentences about the machine, its software and its load."""
    machine = facts["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    first, own_load = (
        "unknown" if facts[name] is None else f"{facts[name]:.1f}" for name in ("at_work", "others")
    )
    return [
        f"{machine['processor']}, {machine['usable_cores']} of {machine['cores']} cores usable, "
        f"{format_size(machine['memory_bytes'])}; {machine['system']}, {machine['libc']}, "
        f"Python {machine['python']}; {packages}; BLAS {machine['blas']}.",
        f"Busy processors before the benchmark: {first}; busy with other programs during it: "
        f"{own_load}.",
    ]


def count_busy_processors() -> float | None:
    """Return the number of busy processors; None if the system does not report it."""
    first = _read_counters()
    time.sleep(_SAMPLE_S)
    load = _compute_load(first, _read_counters())
    return load[0] if load else None


_Counters = tuple[float, float, float] | None


def _read_counters() -> _Counters:
    """Return the clock, and the busy time of all processors and of this process.

    All times are in seconds. The time of this process includes its ended child processes.
    """
    try:
        # The fourth and fifth values are idle and iowait. The rest, guests included, is work.
        values = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
        busy_s = (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return time.monotonic(), busy_s, sum(os.times()[:4])


def _compute_load(first: _Counters, last: _Counters) -> tuple[float, float] | None:
    """Return the mean number of busy processors, in total and for this process."""
    if first is None or last is None or last[0] <= first[0]:
        return None
    seconds, busy_s, own_s = (b - a for a, b in zip(first, last, strict=True))
    return busy_s / seconds, own_s / seconds
