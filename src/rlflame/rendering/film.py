"""A job drawn: episodes chosen, filmed, put together, and turned into a file's bytes.

Must not know: processes, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from PIL.Image import Image

from rlflame.errors import ConfigError
from rlflame.rendering import encoders, episodes, panels
from rlflame.rendering.encoders import Frame
from rlflame.rendering.episodes import Looks, Shot, Stage
from rlflame.rendering.job import Drawing, Job, Kind, Played
from rlflame.rollout.spec import Array

#: The rate that is aimed at where nobody asks for another; steps are left out to come near it.
_RATES: Mapping[Kind, float] = {"gif": 25.0, "mp4": 50.0}
_WIDTHS: Mapping[Kind, int] = {"gif": 320, "mp4": 480, "png": 200}
_STRIP = 8
#: How long the last picture of an episode stays, so that its return can be read.
_HOLD_S = 1.0

Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Reel:
    """One episode: shots at the same ticks for every side."""

    played: Played
    ticks: tuple[int, ...]
    sides: tuple[tuple[Shot, ...], ...]


def draw(job: Job, tell: Tell = lambda drawn, of: None) -> Drawing:
    """The whole drawing; `tell` hears how many episodes are filmed, of how many."""
    look = episodes.looks(job.env)
    mode = "human" if job.kind == "window" else "rgb_array"
    if mode not in look.modes:
        offered = ", ".join(look.modes) or "none"
        raise ConfigError(
            f"{job.env.id} cannot be drawn: of the render modes it offers ({offered}), none is "
            f"{mode}.",
            f"add {mode!r} to its metadata['render_modes'], and draw in render()",
        )
    size = (job.width, job.height) if job.kind == "window" else (_width(job), job.height)
    stage = Stage(job, episodes.drawn_at(job.env, look, *size), mode, partial(_developed, job))
    try:
        chosen = _chosen(stage.scored(job.best_of), job.episodes)
        reels, notes = [], []
        for number, played in enumerate(chosen):
            tell(number, len(chosen))
            reel = _filmed(job, look, stage, played)
            reels.append(reel)
            if reel.played != played:
                notes.append(
                    f"{job.env.id} plays otherwise when it is drawn: episode {played.episode} "
                    f"returned {reel.played.episode_return!r}, and {played.episode_return!r} as "
                    "eval scores it."
                )
        tell(len(chosen), len(chosen))
    finally:
        stage.close()
    return replace(_edited(job, look, reels), notes=tuple(notes))


def _chosen(scored: list[Played], episodes: int) -> list[Played]:
    """All of them in order; or the best of more, the best first."""
    if episodes == len(scored):
        return scored
    return sorted(scored, key=lambda played: -played.episode_return)[:episodes]


def _width(job: Job) -> int | None:
    return job.width or (None if job.height else _WIDTHS[job.kind])


def _developed(job: Job, picture: Array) -> Array:
    """At the size of the panel at once: a long episode at full size is gigabytes."""
    return np.asarray(panels.sized(picture, _width(job), job.height))


def _filmed(job: Job, look: Looks, stage: Stage, played: Played) -> _Reel:
    if job.kind == "window":
        again, _ = stage.filmed(-1, played.episode, ())
        return _Reel(again, (), ())
    ticks = _ticks(job, look, played.length)
    again, shots = stage.filmed(-1, played.episode, frozenset(ticks))
    others = [
        episodes.beside(partial(stage.filmed, side), played.episode, ticks)
        for side in range(len(job.policies) - 1)
    ]
    return _Reel(again, ticks, tuple(map(tuple, (*others, shots))))


def _stride(job: Job, look: Looks) -> int:
    """Steps from one frame to the next: time stays the environment's own."""
    return max(1, round(look.steps_per_s / (job.fps or _RATES[job.kind])))


def _ticks(job: Job, look: Looks, length: int) -> tuple[int, ...]:
    """The steps that are drawn: from the reset to the very last."""
    if job.kind == "png":
        spread = np.linspace(0, length, min(_STRIP, length + 1))
        return tuple(int(tick) for tick in np.unique(np.round(spread)))
    return (*range(0, length, _stride(job, look)), length)


def _edited(job: Job, look: Looks, reels: list[_Reel]) -> Drawing:
    episodes = tuple(reel.played for reel in reels)
    if job.kind == "window":
        seconds = sum(played.length for played in episodes) / look.steps_per_s
        return Drawing(b"", episodes, 0, 0, 0, seconds)
    panel = _Panel(job, reels)
    if job.kind == "png":
        rows = [
            panels.beside([panel(reel, side, at) for at in range(len(reel.ticks))])
            for reel in reels
            for side in range(len(reel.sides))
        ]
        whole = panels.below(rows)
        count = sum(len(reel.ticks) for reel in reels)
        return Drawing(encoders.png(whole), episodes, count, *whole.size, 0.0)
    frames = [frame for reel in reels for frame in _frames(look, reel, panel)]
    if job.kind == "gif":
        data, count = encoders.gif(frames, job.max_bytes)
    else:
        data, count = encoders.mp4(frames, look.steps_per_s / _stride(job, look)), len(frames)
    seconds = sum(frame.seconds for frame in frames)
    return Drawing(data, episodes, count, *frames[0].picture.size, seconds)


class _Panel:
    """One side of a frame; all of a film have one layout."""

    def __init__(self, job: Job, reels: list[_Reel]) -> None:
        self._job = job
        sides = [(reel, side) for reel in reels for side in range(len(reel.sides))]
        captions = [_caption(job, *one) for one in sides]
        self._one_line = panels.in_one_line(captions, reels[0].sides[0][0].picture.shape[1])

    def __call__(self, reel: _Reel, side: int, at: int) -> Image:
        shot = reel.sides[side][at]
        return panels.captioned(
            shot.picture,
            _caption(self._job, reel, side),
            shot.episode_return,
            one_line=self._one_line,
        )


def _frames(look: Looks, reel: _Reel, panel: _Panel) -> list[Frame]:
    following = (*reel.ticks[1:], reel.ticks[-1] + _HOLD_S * look.steps_per_s)
    return [
        Frame(
            panels.beside([panel(reel, side, at) for side in range(len(reel.sides))]),
            (following[at] - reel.ticks[at]) / look.steps_per_s,
        )
        for at in range(len(reel.ticks))
    ]


def _caption(job: Job, reel: _Reel, side: int) -> str:
    many = f", episode {reel.played.episode}" if job.best_of > 1 else ""
    return job.captions[side] + many
