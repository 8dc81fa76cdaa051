"""What is to be drawn, and the result. Plain values and arrays, which travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rlflame.errors import RlflameError
from rlflame.rollout.task import EnvSpec, PolicyArrays, PolicySpec

RenderKind = Literal["gif", "mp4", "png", "window"]


class RenderError(RlflameError):
    """The process that draws did not draw: its graphics, more likely than its environment."""


@dataclass(frozen=True)
class RenderOptions:
    """What a user wants to see: some episodes, or the best of more."""

    kind: RenderKind
    seed: int = 0
    episodes: int = 1
    best_of: int | None = None
    versus_untrained: bool = False
    #: Of one picture, in pixels, without the lines above it.
    width: int | None = None
    height: int | None = None
    fps: float | None = None

    @property
    def candidates(self) -> int:
        """The number of episodes from which the drawn ones are chosen."""
        return self.best_of or self.episodes


@dataclass(frozen=True)
class RenderJob:
    """One drawing. The last policy decides how long it is; the others play beside it, from left
    to right, and start over until its episode has ended."""

    env: EnvSpec
    policy: PolicySpec
    captions: tuple[str, ...]
    policies: tuple[PolicyArrays, ...]
    options: RenderOptions
    max_episode_steps: int
    #: Whether one of MuJoCo's renderers is needed.
    uses_mujoco: bool
    #: A GIF gets fewer frames and colours until it is as small as this.
    max_bytes: int | None = None
    #: Lowers the priority of the process that draws.
    nice: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "options": vars(self.options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RenderJob:
        return cls(**{**values, "options": RenderOptions(**values["options"])})


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode that was drawn, with the return that an evaluation has for it."""

    episode: int
    episode_return: float
    length: int


@dataclass(frozen=True)
class RenderResult:
    """The finished file as bytes (none of a window), and what it shows."""

    data: bytes
    episodes: tuple[PlayedEpisode, ...]
    frames: int
    #: Of the whole picture.
    width: int
    height: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "data": np.frombuffer(self.data, np.uint8)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RenderResult:
        episodes = tuple(PlayedEpisode(**episode) for episode in values["episodes"])
        return cls(**{**values, "data": values["data"].tobytes(), "episodes": episodes})
