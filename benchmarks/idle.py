"""Whether this machine has anything else to do, asked by scripts that time something."""

from __future__ import annotations

import time

from rlflame.bench import machine_load
from rlflame.rollout import machine

#: Of a core, for others; above it what is timed is worth nothing.
MOST = 0.1
_WAITS_S = (2.0, 5.0, 15.0)


def others() -> str:
    """How many processors are at work, for a table, after some patience where that is too many."""
    now = machine_load.count_busy_processors()
    for wait_s in _WAITS_S:
        if now is None or now <= MOST:
            break
        time.sleep(wait_s)
        now = machine_load.count_busy_processors()
    if now is not None and now > MOST:
        print("note: this machine is busy with other work; what is timed now is worthless")
    return "" if now is None else f"{now:.2f}"


def processor() -> str:
    """What this machine computes with, for a table."""
    return str(machine.describe_machine()["processor"])
