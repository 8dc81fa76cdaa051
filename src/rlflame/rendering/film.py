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
from rlflame.rendering.episodes import EpisodePlayer, RenderInfo, StepImage
from rlflame.rendering.job import PlayedEpisode, RenderJob, RenderKind, RenderResult
from rlflame.rollout.spec import Array

#: The rate that is aimed at where nobody asks for another; steps are left out to come near it.
_RATES: Mapping[RenderKind, float] = {"gif": 25.0, "mp4": 50.0}
_WIDTHS: Mapping[RenderKind, int] = {"gif": 320, "mp4": 480, "png": 200}
_STRIP = 8
#: How long the last picture of an episode stays, so that its return can be read.
_HOLD_S = 1.0

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _EpisodeImages:
    """One episode: shots at the same ticks for every side."""

    played: PlayedEpisode
    ticks: tuple[int, ...]
    sides: tuple[tuple[StepImage, ...], ...]


def draw(
    job: RenderJob, report_progress: ProgressCallback = lambda count, of: None
) -> RenderResult:
    """The whole drawing; `report_progress` hears how many episodes are filmed, of how many."""
    info = episodes.read_render_info(job.env)
    mode = "human" if job.kind == "window" else "rgb_array"
    if mode not in info.modes:
        offered = ", ".join(info.modes) or "none"
        raise ConfigError(
            f"{job.env.id} cannot be drawn: of the render modes it offers ({offered}), none is "
            f"{mode}.",
            f"add {mode!r} to its metadata['render_modes'], and draw in render()",
        )
    size = (job.width, job.height) if job.kind == "window" else (_resolve_width(job), job.height)
    player = EpisodePlayer(
        job, episodes.make_render_spec(job.env, info, *size), mode, partial(_resize, job)
    )
    try:
        selected = _select_episodes(player.score_episodes(job.best_of), job.episodes)
        reels, notes = [], []
        for number, played in enumerate(selected):
            report_progress(number, len(selected))
            reel = _render_episode(job, info, player, played)
            reels.append(reel)
            if reel.played != played:
                notes.append(
                    f"{job.env.id} plays otherwise when it is drawn: episode {played.episode} "
                    f"returned {reel.played.episode_return!r}, and {played.episode_return!r} as "
                    "eval scores it."
                )
        report_progress(len(selected), len(selected))
    finally:
        player.close()
    return replace(_assemble(job, info, reels), notes=tuple(notes))


def _select_episodes(scored: list[PlayedEpisode], episodes: int) -> list[PlayedEpisode]:
    """All of them in order; or the best of more, the best first."""
    if episodes == len(scored):
        return scored
    return sorted(scored, key=lambda played: -played.episode_return)[:episodes]


def _resolve_width(job: RenderJob) -> int | None:
    return job.width or (None if job.height else _WIDTHS[job.kind])


def _resize(job: RenderJob, picture: Array) -> Array:
    """At the size of the panel at once: a long episode at full size is gigabytes."""
    return np.asarray(panels.resize_image(picture, _resolve_width(job), job.height))


def _render_episode(
    job: RenderJob, info: RenderInfo, player: EpisodePlayer, played: PlayedEpisode
) -> _EpisodeImages:
    if job.kind == "window":
        again, _ = player.render_episode(-1, played.episode, ())
        return _EpisodeImages(again, (), ())
    ticks = _choose_ticks(job, info, played.length)
    again, shots = player.render_episode(-1, played.episode, frozenset(ticks))
    other_sides = [
        episodes.render_repeated_episodes(
            partial(player.render_episode, side), played.episode, ticks
        )
        for side in range(len(job.policies) - 1)
    ]
    return _EpisodeImages(again, ticks, tuple(map(tuple, (*other_sides, shots))))


def _compute_stride(job: RenderJob, info: RenderInfo) -> int:
    """Steps from one frame to the next: time stays the environment's own."""
    return max(1, round(info.steps_per_s / (job.fps or _RATES[job.kind])))


def _choose_ticks(job: RenderJob, info: RenderInfo, length: int) -> tuple[int, ...]:
    """The steps that are drawn: from the reset to the very last."""
    if job.kind == "png":
        spread = np.linspace(0, length, min(_STRIP, length + 1))
        return tuple(int(tick) for tick in np.unique(np.round(spread)))
    return (*range(0, length, _compute_stride(job, info)), length)


def _assemble(job: RenderJob, info: RenderInfo, reels: list[_EpisodeImages]) -> RenderResult:
    episodes = tuple(reel.played for reel in reels)
    if job.kind == "window":
        seconds = sum(played.length for played in episodes) / info.steps_per_s
        return RenderResult(b"", episodes, 0, 0, 0, seconds)
    panel = _Panel(job, reels)
    if job.kind == "png":
        rows = [
            panels.join_horizontally([panel(reel, side, at) for at in range(len(reel.ticks))])
            for reel in reels
            for side in range(len(reel.sides))
        ]
        sheet = panels.join_vertically(rows)
        count = sum(len(reel.ticks) for reel in reels)
        return RenderResult(encoders.encode_png(sheet), episodes, count, *sheet.size, 0.0)
    frames = [frame for reel in reels for frame in _make_frames(info, reel, panel)]
    if job.kind == "gif":
        data, count = encoders.encode_gif(frames, job.max_bytes)
    else:
        data, count = (
            encoders.encode_mp4(frames, info.steps_per_s / _compute_stride(job, info)),
            len(frames),
        )
    seconds = sum(frame.seconds for frame in frames)
    return RenderResult(data, episodes, count, *frames[0].picture.size, seconds)


class _Panel:
    """One side of a frame; all of a film have one layout."""

    def __init__(self, job: RenderJob, reels: list[_EpisodeImages]) -> None:
        self._job = job
        sides = [(reel, side) for reel in reels for side in range(len(reel.sides))]
        captions = [_make_caption(job, *entry) for entry in sides]
        self._one_line = panels.can_fit_one_line(captions, reels[0].sides[0][0].picture.shape[1])

    def __call__(self, reel: _EpisodeImages, side: int, at: int) -> Image:
        shot = reel.sides[side][at]
        return panels.add_caption(
            shot.picture,
            _make_caption(self._job, reel, side),
            shot.episode_return,
            one_line=self._one_line,
        )


def _make_frames(info: RenderInfo, reel: _EpisodeImages, panel: _Panel) -> list[Frame]:
    following = (*reel.ticks[1:], reel.ticks[-1] + _HOLD_S * info.steps_per_s)
    return [
        Frame(
            panels.join_horizontally([panel(reel, side, at) for side in range(len(reel.sides))]),
            (following[at] - reel.ticks[at]) / info.steps_per_s,
        )
        for at in range(len(reel.ticks))
    ]


def _make_caption(job: RenderJob, reel: _EpisodeImages, side: int) -> str:
    many = f", episode {reel.played.episode}" if job.best_of > 1 else ""
    return job.captions[side] + many
