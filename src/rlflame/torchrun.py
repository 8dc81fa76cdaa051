"""What torchrun says of a process that it has started. Must not know: what the process does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from rlflame.errors import ConfigError


class Place(NamedTuple):
    """A process among those that learn together."""

    rank: int
    size: int


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Ours, where torchrun has started this process beside others."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    try:
        found = Place(int(environment["RANK"]), int(environment["WORLD_SIZE"]))
    except ValueError:
        rank, size = environment["RANK"], environment["WORLD_SIZE"]
        raise ConfigError(
            f"RANK is {rank!r} and WORLD_SIZE {size!r}; they are numbers where torchrun sets them.",
            "unset RANK WORLD_SIZE",
        ) from None
    return found if found.size > 1 else None


def hosts(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether it keeps the place where processes meet, before any of them has come there."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
