"""What a benchmark runs on, and whether it has the machine to itself.

Must not know: what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from rlflame.bench.base import Surroundings
from rlflame.rollout import blas
from rlflame.rollout.blas_env import THREAD_VARIABLES
from rlflame.storage import machine_info

#: Processors' worth of other work above which a machine counts as busy, of those usable.
_BUSY_SHARE = 0.25
#: How long the processors are looked at.
_GLANCE_S = 0.5
_STAT = Path("/proc/stat")


def look(
    load: Callable[[], tuple[float, float, float]] = os.getloadavg,
    glance: Callable[[], float | None] | None = None,
) -> Surroundings:
    """Before anything is measured, so that what works is others.

    A load comes and goes minutes after the work: it is asked only where processors cannot be seen.
    """
    try:
        found: tuple[float, float, float] | None = load()
    except OSError:
        found = None
    most = _most()
    now = (glance or at_work)()
    return Surroundings(
        machine=machine_info.describe(),
        threads={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        load_before=found,
        at_work=now,
        busy=now > most if now is not None else found is not None and found[0] > most,
    )


class Watch:
    """The surroundings, and what others do from now on beside these fleets.

    That is what all processors do, less this process and its children. Executors of Flame are
    nobody's children here, so beside them it cannot be told.
    """

    def __init__(self, fleets: Collection[str] = (), found: Surroundings | None = None) -> None:
        self._found = found or look()
        self._began = None if "flame" in fleets else self._look()

    def over(self) -> Surroundings:
        """Once all children have been waited for, without which their work is that of others."""
        found, before, now = self._found, self._began, self._look()
        if before is None or now is None or now[1] <= before[1]:
            return found
        seconds = now[1] - before[1]
        others = max(0.0, (now[0] - before[0] - (now[2] - before[2])) / seconds)
        return replace(found, others=others, busy=found.busy or others > _most())

    def _look(self) -> tuple[float, float, float] | None:
        """Seconds of all processors, by the clock, and of this process and its children."""
        try:
            busy, _ = _ticks(_STAT.read_text())
            ticks = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None
        mine = os.times()
        spent = mine.user + mine.system + mine.children_user + mine.children_system
        return busy / ticks, time.monotonic(), spent


def _most() -> float:
    """Processors that others may have before the machine counts as busy."""
    return max(0.5, _BUSY_SHARE * blas.usable_cores())


def at_work(seconds: float = _GLANCE_S) -> float | None:
    """How many processors work while this one looks on, where the system says so."""
    try:
        busy, rest = _ticks(_STAT.read_text())
        time.sleep(seconds)
        later, rested = _ticks(_STAT.read_text())
    except (OSError, ValueError, IndexError):
        return None
    spent, waited = later - busy, rested - rest
    if spent + waited <= 0:
        return None
    return (os.cpu_count() or 1) * spent / (spent + waited)


def _ticks(stat: str) -> tuple[int, int]:
    """Of all processors: at work, also for the hosts of this machine, and at rest."""
    values = [int(word) for word in stat.splitlines()[0].split()[1:9]]
    rest = values[3] + values[4]
    return sum(values) - rest, rest
