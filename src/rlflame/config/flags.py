"""The options of commands as typed values: what the user typed, and nothing from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RuntimeFlags:
    """Options that decide where and how a command runs; None and False where one is absent."""

    sets: Sequence[str] | None = None
    workers: int | None = None
    learners: int | None = None
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
    """The options of `train` that make its config."""

    env: str | None = None
    algo: str | None = None
    steps: int | None = None
    iterations: int | None = None
    episodes_per_iter: int | None = None
    seed: int | None = None
    preset: str | None = None
    config: Path | None = None
    env_kwargs: Sequence[str] | None = None
    until_return: float | None = None
    out: Path | None = None
    #: cpu or cuda; the command line turns auto into one of them.
    device: str | None = None
    scale_batch: bool = False
    scale_lr: bool = False
