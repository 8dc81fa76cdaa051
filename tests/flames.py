"""The Flame that tests run against: the stub, or the cluster that FLAME_ENDPOINT names.

Both are spoken to by the unmodified flamepy client.
"""

from __future__ import annotations

import atexit
import os
from functools import cache
from pathlib import Path
from typing import Any

from flame_stub import FlameStub

from rlflame.config.runtime import RuntimeSettings
from rlflame.fleet.flame.fleet import FlameFleet

#: Where conftest keeps the variables of a real cluster, out of reach of all other tests.
KEPT = "RLFLAME_TEST_"
VARIABLES = ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE")
REAL = bool(os.environ.get(f"{KEPT}FLAME_ENDPOINT"))
FAKES = str(Path(__file__).with_name("fakes.py"))


@cache
def shared_stub() -> FlameStub:
    """One stub for all tests that leave it as it was."""
    stub = FlameStub(executors=6)
    stub.__enter__()
    atexit.register(stub.close)
    return stub


def environment() -> dict[str, str]:
    """The variables that lead to the Flame under test."""
    if REAL:
        return {name: found for name in VARIABLES if (found := os.environ.get(KEPT + name))}
    return shared_stub().environment()


def settle(variables: dict[str, str]) -> None:
    """Point this process at a Flame; flamepy remembers the last one otherwise."""
    FlameStub.reset_client()
    os.environ.update(variables)


def fleet(observer: Any, workers: int = 2, **flame: Any) -> FlameFleet:
    """A fleet on the Flame that this process points at, with such settings."""
    common = {"max_retries", "step_deadline_s"} & flame.keys()
    runtime: dict[str, Any] = {name: flame.pop(name) for name in common}
    flame = {"delay_release_s": 5, **flame}
    if REAL:  # a small cluster has room for all fleets of a test run if no processors are asked for
        flame = {"cpu": 0, "memory": "1m", **flame}
    settings = RuntimeSettings(workers=workers, env_file=FAKES, flame=flame, **runtime)
    return FlameFleet(workers, settings, observer=observer)
