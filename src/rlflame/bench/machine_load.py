"""What a benchmark runs on, and whether it has the machine to itself.

Must not know: what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from rlflame.bench.base import MachineConditions
from rlflame.rollout import machine
from rlflame.rollout.blas import THREAD_VARIABLES
from rlflame.storage import machine_info

#: Processors' worth of other work above which a machine counts as busy, of those usable.
_BUSY_SHARE = 0.25
#: How long the processors are looked at.
_SAMPLE_S = 0.5
_STAT = Path("/proc/stat")


def read_conditions(
    load: Callable[[], tuple[float, float, float]] = os.getloadavg,
    sample: Callable[[], float | None] | None = None,
) -> MachineConditions:
    """Before anything is measured, so that what works is others.

    A load comes and goes minutes after the work: it is asked only where processors cannot be seen.
    """
    try:
        load_average: tuple[float, float, float] | None = load()
    except OSError:
        load_average = None
    most = _compute_busy_limit()
    now = (sample or count_busy_processors)()
    return MachineConditions(
        machine=machine_info.describe_machine(),
        threads={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        load_before=load_average,
        at_work=now,
        busy=now > most if now is not None else load_average is not None and load_average[0] > most,
    )


class LoadMonitor:
    """The surroundings, and what others do from now on beside these fleets.

    That is what all processors do, less this process and its children. Executors of Flame are
    nobody's children here, so beside them it cannot be told.
    """

    def __init__(
        self, fleets: Collection[str] = (), conditions: MachineConditions | None = None
    ) -> None:
        self._conditions = conditions or read_conditions()
        self._start_counters = None if "flame" in fleets else self._read_counters()

    def finish(self) -> MachineConditions:
        """Once all children have been waited for, without which their work is that of others."""
        conditions, before, now = self._conditions, self._start_counters, self._read_counters()
        if before is None or now is None or now[1] <= before[1]:
            return conditions
        seconds = now[1] - before[1]
        other_load = max(0.0, (now[0] - before[0] - (now[2] - before[2])) / seconds)
        return replace(
            conditions,
            others=other_load,
            busy=conditions.busy or other_load > _compute_busy_limit(),
        )

    def _read_counters(self) -> tuple[float, float, float] | None:
        """Seconds of all processors, by the clock, and of this process and its children."""
        try:
            busy, _ = _parse_ticks(_STAT.read_text())
            ticks = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None
        times = os.times()
        spent = times.user + times.system + times.children_user + times.children_system
        return busy / ticks, time.monotonic(), spent


def _compute_busy_limit() -> float:
    """Processors that others may have before the machine counts as busy."""
    return max(0.5, _BUSY_SHARE * machine.count_usable_cores())


def count_busy_processors(seconds: float = _SAMPLE_S) -> float | None:
    """How many processors work while this one looks on, where the system says so."""
    try:
        busy, rest = _parse_ticks(_STAT.read_text())
        time.sleep(seconds)
        busy_after, rest_after = _parse_ticks(_STAT.read_text())
    except (OSError, ValueError, IndexError):
        return None
    spent, waited = busy_after - busy, rest_after - rest
    if spent + waited <= 0:
        return None
    return (os.cpu_count() or 1) * spent / (spent + waited)


def _parse_ticks(stat: str) -> tuple[int, int]:
    """Of all processors: at work, also for the hosts of this machine, and at rest."""
    values = [int(word) for word in stat.splitlines()[0].split()[1:9]]
    rest = values[3] + values[4]
    return sum(values) - rest, rest
