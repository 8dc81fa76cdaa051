"""Check that no other work runs on this machine during a measurement."""

from __future__ import annotations

import time

from rlflame.bench import machine_load
from rlflame.rollout import machine

#: The load of other processes, in cores, above which a measurement is unreliable.
MOST = 0.1
_WAITS_S = (2.0, 5.0, 15.0)


def others(*, waits: bool = True) -> str:
    """Return the number of busy processors. Wait up to 22 s for an idle machine."""
    now = machine_load.count_busy_processors()
    for wait_s in _WAITS_S if waits else ():
        if now is None or now <= MOST:
            break
        time.sleep(wait_s)
        now = machine_load.count_busy_processors()
    if now is not None and now > MOST:
        print("note: this machine is busy with other work, so these times are unreliable")
    return "" if now is None else f"{now:.2f}"


def processor() -> str:
    """Return the name of the processor."""
    return str(machine.describe_machine()["processor"])
