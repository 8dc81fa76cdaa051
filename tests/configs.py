"""Configs for tests, with settings by their full names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflame.config import toml_io
from rlflame.config.flags import TrainFlags
from rlflame.config.recipe import RunConfig
from rlflame.config.resolve import resolve
from rlflame.experiment.components import has_continuous_actions


def make_config(
    env: str | None = None,
    algo: str | None = None,
    sets: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
    preset: str | None = None,
) -> RunConfig:
    """Make the preset's config for an environment, changed by texts and values."""
    words = [f"{name}={toml_io.format_value(value)}" for name, value in (settings or {}).items()]
    flags = TrainFlags(env=env, algo=algo, preset=preset, sets=[*sets, *words])
    return resolve(flags, has_continuous_actions)[0]
