"""Rendering jobs and results as plain values that processes can exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rlflame.errors import RlflameError
from rlflame.rollout.task import EnvSpec, PolicyArrays, PolicySpec

RenderKind = Literal["gif", "mp4", "png", "window"]


class RenderError(RlflameError):
    """Raised when the rendering process fails, usually because of a graphics problem."""


@dataclass(frozen=True)
class RenderOptions:
    """The options of a rendering, such as episodes, image size and frame rate."""

    kind: RenderKind
    seed: int = 0
    episodes: int = 1
    best_of: int | None = None
    versus_untrained: bool = False
    #: Width and height of one image in pixels, without the caption.
    width: int | None = None
    height: int | None = None
    fps: float | None = None

    @property
    def candidates(self) -> int:
        """The number of episodes from which the rendered episodes are chosen."""
        return self.best_of or self.episodes


@dataclass(frozen=True)
class RenderJob:
    """A job that renders the last policy, with the other policies beside it."""

    env: EnvSpec
    policy: PolicySpec
    captions: tuple[str, ...]
    #: The policies from left to right. The others start new episodes until the last policy's
    #: episode has ended.
    policies: tuple[PolicyArrays, ...]
    options: RenderOptions
    max_episode_steps: int
    #: Whether one of MuJoCo's renderers is needed.
    uses_mujoco: bool
    #: A GIF gets fewer frames and colours until it is this small.
    max_bytes: int | None = None
    #: The niceness of the rendering process. A higher value lowers its priority.
    nice: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "options": vars(self.options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RenderJob:
        return cls(**{**values, "options": RenderOptions(**values["options"])})


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """The number, return and length of a played episode."""

    episode: int
    episode_return: float
    length: int


@dataclass(frozen=True)
class RenderResult:
    """The finished file as bytes (empty for a window), and information about it."""

    data: bytes
    episodes: tuple[PlayedEpisode, ...]
    frames: int
    #: The size of the whole image.
    width: int
    height: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "data": np.frombuffer(self.data, np.uint8)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RenderResult:
        episodes = tuple(PlayedEpisode(**episode) for episode in values["episodes"])
        return cls(**{**values, "data": values["data"].tobytes(), "episodes": episodes})
