"""The description and the result of a drawing, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rlflame.errors import RlflameError
from rlflame.rollout.task import EnvSpec, PolicyArrays, PolicySpec

RenderKind = Literal["gif", "mp4", "png", "window"]


class RenderError(RlflameError):
    """The drawing process failed, more likely by graphics than by environment."""


@dataclass(frozen=True)
class RenderOptions:
    """The episodes that a user wants to see, or the best of several."""

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
        """The number of episodes from which the drawn ones are chosen."""
        return self.best_of or self.episodes


@dataclass(frozen=True)
class RenderJob:
    """A drawing. The last policy decides its length.

    The other policies play beside it, from left to right, and start again until its episode ends.
    """

    env: EnvSpec
    policy: PolicySpec
    captions: tuple[str, ...]
    policies: tuple[PolicyArrays, ...]
    options: RenderOptions
    max_episode_steps: int
    #: Whether one of MuJoCo's renderers is needed.
    uses_mujoco: bool
    #: A GIF gets fewer frames and colours until it is this small.
    max_bytes: int | None = None
    #: Lowers the priority of the drawing process.
    nice: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "options": vars(self.options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RenderJob:
        return cls(**{**values, "options": RenderOptions(**values["options"])})


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """A drawn episode with its return in the evaluation."""

    episode: int
    episode_return: float
    length: int


@dataclass(frozen=True)
class RenderResult:
    """The finished file as bytes (none for a window), and its facts."""

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
