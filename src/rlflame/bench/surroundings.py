"""What a benchmark runs on, and whether it has the machine to itself.

Must not know: what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from rlflame import machine
from rlflame.bench import Surroundings
from rlflame.rollout import blas
from rlflame.rollout.threads import THREAD_VARIABLES

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
    most = max(0.5, _BUSY_SHARE * blas.usable_cores())
    now = (glance or at_work)()
    return Surroundings(
        machine=machine.describe(),
        threads={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        load_before=found,
        at_work=now,
        busy=now > most if now is not None else found is not None and found[0] > most,
    )


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
