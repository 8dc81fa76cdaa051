"""What a benchmark runs on, and whether it has the machine to itself.

Must not know: what is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from rlflame import machine
from rlflame.bench import Surroundings
from rlflame.rollout import blas

#: Processors' worth of other work above which a machine counts as busy, of those usable.
_BUSY_SHARE = 0.25
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def look(load: Callable[[], tuple[float, float, float]] = os.getloadavg) -> Surroundings:
    """Before anything is measured, so that the load is that of others."""
    try:
        found: tuple[float, float, float] | None = load()
    except OSError:
        found = None
    most = max(0.5, _BUSY_SHARE * blas.usable_cores())
    return Surroundings(
        machine=machine.describe(),
        threads={name: os.environ[name] for name in _THREADS if name in os.environ},
        load_before=found,
        busy=found is not None and found[0] > most,
    )
