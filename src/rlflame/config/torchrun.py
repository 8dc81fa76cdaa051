"""The place among learners that torchrun gives to a process, from its environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from rlflame.errors import ConfigError

_UNSET_HINT = "start the processes by torchrun, or: unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"


class LearnerRank(NamedTuple):
    """A process among those that learn together."""

    rank: int
    size: int


def read_rank(environment: Mapping[str, str] = os.environ) -> LearnerRank | None:
    """The rank of this process; None where torchrun has not started it beside others."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    rank, size = _read_number(environment, "RANK"), _read_number(environment, "WORLD_SIZE")
    if size <= 1:
        return None
    _read_number(environment, "MASTER_PORT")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {size}; ranks begin at 0.", _UNSET_HINT)
    return LearnerRank(rank, size)


def _read_number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(
            f"{name} is {environment[name]!r}, and a number where torchrun sets it.", _UNSET_HINT
        ) from None


def has_agent_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun itself keeps the store where the processes meet."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
