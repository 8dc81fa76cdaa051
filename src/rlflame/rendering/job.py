"""The contract of drawing: what is to be drawn, and what comes of it.

Plain values and arrays, because they travel to the process that draws and back. Must not know:
files, checkpoints, processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from rlflame.errors import RlflameError
from rlflame.rollout.spec import EnvSpec, PolicyArrays, PolicySpec

RenderKind = Literal["gif", "mp4", "png", "window"]
KIND_BY_SUFFIX: dict[str, RenderKind] = {".gif": "gif", ".mp4": "mp4", ".png": "png"}


class RenderError(RlflameError):
    """The process that draws did not draw: its graphics, more likely than its environment."""


@dataclass(frozen=True, slots=True)
class RenderJob:
    """One drawing. Of several policies the last is the one that matters; the others play beside
    it, from left to right, and start over until its episode has ended."""

    env: EnvSpec
    policy: PolicySpec
    captions: tuple[str, ...]
    policies: tuple[PolicyArrays, ...]
    kind: RenderKind
    seed: int
    #: Which episodes: as many as this, the best of as many as that.
    episodes: int
    best_of: int
    max_episode_steps: int
    #: Of one picture, in pixels, without the line above it.
    width: int | None = None
    height: int | None = None
    fps: float | None = None
    #: A GIF gets fewer frames and colours until it is as small as this.
    max_bytes: int | None = None
    #: How far it stands back behind other processes.
    nice: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RenderJob:
        return cls(**values)


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode that was drawn; the return is the one that an evaluation has for it."""

    episode: int
    episode_return: float
    length: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RenderResult:
    """The finished file as bytes (none of a window), and what it shows."""

    data: bytes
    episodes: tuple[PlayedEpisode, ...]
    frames: int
    #: Of the whole picture.
    width: int
    height: int
    seconds: float
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As it travels."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        data = np.frombuffer(self.data, np.uint8)
        return {**values, "data": data, "episodes": [played.as_dict() for played in self.episodes]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RenderResult:
        episodes = tuple(PlayedEpisode(**played) for played in values["episodes"])
        return cls(**{**values, "data": values["data"].tobytes(), "episodes": episodes})
