"""The Flame that tests use: the stub, or the cluster that FLAME_ENDPOINT names.

The tests use the unmodified flamepy client for both.
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

#: conftest.py moves the variables of a real cluster here, so that other tests do not use it.
KEPT = "RLFLAME_TEST_"
VARIABLES = ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE")
REAL = bool(os.environ.get(f"{KEPT}FLAME_ENDPOINT"))
FAKES = str(Path(__file__).with_name("fakes.py"))


@cache
def shared_stub() -> FlameStub:
    """One stub for all tests that do not change it."""
    stub = FlameStub(executors=6)
    stub.__enter__()
    atexit.register(stub.close)
    return stub


def environment() -> dict[str, str]:
    """The environment variables that select the Flame under test."""
    if REAL:
        return {name: found for name in VARIABLES if (found := os.environ.get(KEPT + name))}
    return shared_stub().environment()


def settle(variables: dict[str, str]) -> None:
    """Select a Flame for this process; flamepy would keep using the previous one."""
    FlameStub.reset_client()
    os.environ.update(variables)


def fleet(observer: Any, workers: int = 2, *, env_file: str = FAKES, **flame: Any) -> FlameFleet:
    """A fleet with these settings on the selected Flame."""
    common = {"max_retries", "step_deadline_s"} & flame.keys()
    runtime: dict[str, Any] = {name: flame.pop(name) for name in common}
    flame = {"delay_release_s": 5, **flame}
    if REAL:  # without processors, a small cluster has room for all fleets of a test run
        flame = {"cpu": 0, "memory": "1m", **flame}
    settings = RuntimeSettings(workers=workers, env_file=env_file, flame=flame, **runtime)
    return FlameFleet(workers, settings, observer=observer)
