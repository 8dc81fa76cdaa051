"""The options of a command, and its rank among the processes of torchrun.

This module imports nothing slow, because --help imports it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlflame.errors import ConfigError

PRESET_FOLDER = Path(__file__).with_name("presets")
#: The algorithms with a default preset. Reading them from TRAITS would import pydantic, which is
#: slow.
ALGORITHM_NAMES = sorted(
    path.stem.removeprefix("default-") for path in PRESET_FOLDER.glob("default-*.toml")
)
DEFAULT_ALGORITHM = "ppo"


@dataclass(frozen=True, kw_only=True)
class RuntimeFlags:
    """The options for where and how a command runs; unset options are None or False."""

    sets: Sequence[str] | None = None
    workers: int | None = None
    #: A number, or auto.
    learners: str | None = None
    fleet: str | None = None
    local: bool = False
    env_file: Path | None = None
    allow_modules: Sequence[str] | None = None
    video_every: int | None = None
    tensorboard: bool = False
    json_lines: bool = False
    quiet: bool = False
    plain: bool = False
    debug: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainFlags(RuntimeFlags):
    """The options of `train` that determine its config."""

    env: str | None = None
    algo: str | None = None
    steps: int | None = None
    iterations: int | None = None
    #: In the unit of the budget.
    horizon: int | None = None
    episodes_per_iter: int | None = None
    seed: int | None = None
    preset: str | None = None
    config: Path | None = None
    env_kwargs: Sequence[str] | None = None
    wrap: Sequence[str] | None = None
    until_return: float | None = None
    out: Path | None = None
    #: cpu or cuda; the command line resolves auto to one of them.
    device: str | None = None
    scale_batch: bool = False
    scale_lr: bool = False


class LearnerRank(NamedTuple):
    """The rank of a learner process, and the number of learners."""

    rank: int
    size: int


def read_rank(environment: Mapping[str, str] = os.environ) -> LearnerRank | None:
    """Return this process's rank, or None if torchrun did not start several processes."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in environment for name in names):
        return None
    if environment["WORLD_SIZE"] == "1":
        return None
    try:
        rank, size, _ = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size:
        values = ", ".join(f"{name}={environment[name]!r}" for name in names)
        raise ConfigError(
            f"{values} are not valid values of torchrun's variables.",
            f"start the processes with torchrun, or: unset {' '.join(names)}",
        )
    return LearnerRank(rank, size)


def has_agent_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun itself hosts the rendezvous store."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
