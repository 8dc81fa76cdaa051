"""Renders a job: records episodes, joins the images and encodes the file."""

from __future__ import annotations

import io
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlflame.errors import ConfigError
from rlflame.rendering import episodes
from rlflame.rendering.episodes import EpisodePlayer, StepImage
from rlflame.rendering.job import PlayedEpisode, RenderJob, RenderKind, RenderResult
from rlflame.rollout.task import Array
from rlflame.terminal_text import format_count

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

#: The frame rate without --fps; steps are skipped to come close to it.
_RATES: Mapping[RenderKind, float] = {"gif": 25.0, "mp4": 50.0}
_WIDTHS: Mapping[RenderKind, int] = {"gif": 320, "mp4": 480, "png": 200}
_STRIP = 8
#: The time for which the last image of an episode is shown, so that its return can be read.
_HOLD_S = 1.0
_PAPER = (24, 26, 31)
_INK = (240, 240, 240)
_GAP = 4
#: The numbers of colours to try for a GIF. A GIF reserves one for pixels that do not change.
COLOURS = (255, 127, 63)
_SLOWEST_FPS = 8.0
_SAMPLED_PIXELS = 1_000_000


@dataclass(frozen=True, slots=True)
class Frame:
    """An image and the time for which it is shown."""

    picture: Image.Image
    seconds: float


@dataclass(frozen=True, slots=True)
class _EpisodeImages:
    """The images of one clip, at the same ticks for every policy."""

    episode: PlayedEpisode
    ticks: tuple[int, ...]
    sides: tuple[list[StepImage], ...]


class Video:
    """Renders a job as a video, as a strip of images or in a window."""

    def __init__(self, job: RenderJob) -> None:
        self._job, self._options = job, job.options
        self._kind = job.options.kind
        self._info = episodes.read_render_info(job.env)
        mode = "human" if self._kind == "window" else "rgb_array"
        if mode not in self._info.modes:
            modes = ", ".join(self._info.modes) or "none"
            raise ConfigError(
                f"{job.env.id} cannot be rendered: its render modes ({modes}) do not include "
                f"{mode}.",
                f"add {mode!r} to its metadata['render_modes'], and implement it in render()",
            )
        default_width = None if self._options.height else _WIDTHS.get(self._kind)
        size = self._options.width or default_width, self._options.height
        env = episodes.make_render_spec(job.env, self._info, *size)
        # Resize each image immediately, because a long episode at full size takes gigabytes.
        self._player = EpisodePlayer(
            job, env, mode, lambda picture: np.asarray(resize_image(picture, *size))
        )
        rate = self._options.fps or _RATES.get(self._kind, 1.0)
        #: The number of steps per frame. The video plays at the environment's speed.
        self._stride = max(1, round(self._info.steps_per_s / rate))

    def draw(self, report_progress: Callable[[str], None] = lambda text: None) -> RenderResult:
        """Render the job; `report_progress` is called with a description of each stage."""
        try:
            report_progress(f"playing {format_count(self._options.candidates, 'episode')}")
            best_episodes = self._player.score_episodes(self._options.candidates)
            if len(best_episodes) > self._options.episodes:  # the best episodes, best first
                best_episodes.sort(key=lambda episode: -episode.episode_return)
            clips = []
            for number, episode in enumerate(best_episodes[: self._options.episodes], 1):
                name = f"episode {number} of {self._options.episodes}"
                self._player.camera.report_image = _make_image_counter(name, report_progress)
                clips.append(self._render_episode(episode))
        finally:
            self._player.close()
        report_progress("encoding the images")
        return self._assemble(clips)

    def _render_episode(self, episode: PlayedEpisode) -> _EpisodeImages:
        render_side = self._player.render_episode
        ticks = () if self._kind == "window" else self._choose_ticks(episode.length)
        shown_episode, images = render_side(-1, episode.episode, frozenset(ticks))
        other_sides = [
            episodes.render_repeated_episodes(partial(render_side, side), episode.episode, ticks)
            for side in range(len(self._job.policies) - 1)
        ]
        return _EpisodeImages(shown_episode, ticks, (*other_sides, images))

    def _choose_ticks(self, length: int) -> tuple[int, ...]:
        """Choose the steps to draw, from the reset to the last step."""
        if self._kind == "png":
            spread = np.linspace(0, length, min(_STRIP, length + 1))
            return tuple(int(tick) for tick in np.unique(np.round(spread)))
        return (*range(0, length, self._stride), length)

    def _assemble(self, clips: list[_EpisodeImages]) -> RenderResult:
        episodes_shown = tuple(clip.episode for clip in clips)
        if self._kind == "window":
            seconds = sum(episode.length for episode in episodes_shown) / self._info.steps_per_s
            return RenderResult(b"", episodes_shown, 0, 0, 0, seconds)
        if self._kind == "png":
            strips = [
                join_images([self._make_panel(clip, side, at) for at in range(len(clip.ticks))], 0)
                for clip in clips
                for side in range(len(clip.sides))
            ]
            sheet, count = join_images(strips, 1), sum(len(clip.ticks) for clip in clips)
            return RenderResult(encode_png(sheet), episodes_shown, count, *sheet.size, 0.0)
        frames = [frame for clip in clips for frame in self._make_frames(clip)]
        if self._kind == "gif":
            data, count = encode_gif(frames, self._job.max_bytes)
        else:
            data = encode_mp4(frames, self._info.steps_per_s / self._stride)
            count = len(frames)
        seconds = sum(frame.seconds for frame in frames)
        return RenderResult(data, episodes_shown, count, *frames[0].picture.size, seconds)

    def _make_frames(self, clip: _EpisodeImages) -> Iterator[Frame]:
        next_ticks = (*clip.ticks[1:], clip.ticks[-1] + _HOLD_S * self._info.steps_per_s)
        for at, (start, end) in enumerate(zip(clip.ticks, next_ticks, strict=True)):
            panels = [self._make_panel(clip, side, at) for side in range(len(clip.sides))]
            yield Frame(join_images(panels, 0), (end - start) / self._info.steps_per_s)

    def _make_panel(self, clip: _EpisodeImages, side: int, at: int) -> Image.Image:
        """Return the image of one policy at a tick, below its caption."""
        image, caption = clip.sides[side][at], self._job.captions[side]
        if self._options.candidates > 1:
            caption += f", episode {clip.episode.episode}"
        return add_caption(image.picture, (caption, f"return {image.episode_return:,.1f}"))


def _make_image_counter(name: str, report_progress: Callable[[str], None]) -> Callable[[], None]:
    """Return a function that reports the number of images after every tenth one."""
    numbers = itertools.count(1)

    def count_image() -> None:
        number = next(numbers)
        if number % 10 == 1:
            report_progress(f"rendering {name}, image {number:,}")

    return count_image


def resize_image(picture: Array, width: int | None, height: int | None) -> Image.Image:
    """Resize an image; if only the width or the height is given, keep the proportions."""
    image = Image.fromarray(picture)
    own_width, own_height = image.size
    if width is None:
        width = own_width if height is None else max(1, round(own_width * height / own_height))
    if height is None:
        height = max(1, round(own_height * width / own_width))
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)


def add_caption(picture: Array, lines: Sequence[str]) -> Image.Image:
    """Return the image with lines of text above it."""
    image = Image.fromarray(picture)
    width, height = image.size
    size = max(11, min(22, width // 20))
    line_height = round(1.6 * size)
    head = len(lines) * line_height
    result = Image.new("RGB", (width, height + head), _PAPER)
    result.paste(image, (0, head))
    draw, font = ImageDraw.Draw(result), _load_font(size)
    for number, text in enumerate(lines):
        place = max(2, width // 60), number * line_height + line_height // 2
        draw.text(place, text, _INK, font, anchor="lm")
    return result


def join_images(images: Sequence[Image.Image], axis: int) -> Image.Image:
    """Join images with gaps, from left to right (axis 0) or top to bottom (axis 1)."""
    size = [max(image.size[side] for image in images) for side in (0, 1)]
    size[axis] = sum(image.size[axis] + _GAP for image in images) - _GAP
    result = Image.new("RGB", (size[0], size[1]), _PAPER)
    place = [0, 0]
    for image in images:
        result.paste(image, (place[0], place[1]))
        place[axis] += image.size[axis] + _GAP
    return result


@cache
def _load_font(size: int) -> Font:
    return ImageFont.load_default(size)


def encode_gif(frames: Sequence[Frame], max_bytes: int | None) -> tuple[bytes, int]:
    """Encode a looping GIF with one palette; return it and its number of frames.

    To stay within a size limit, reduce the colours, then drop every second frame and start again.
    """
    remaining, data = list(frames), b""
    while True:
        for colours in COLOURS:
            data = _encode_palette_gif(remaining, colours)
            if max_bytes is None or len(data) <= max_bytes:
                return data, len(remaining)
        fps = len(remaining) / sum(frame.seconds for frame in remaining)
        if len(remaining) < 3 or fps / 2 < _SLOWEST_FPS:
            return data, len(remaining)
        remaining = halve_frames(remaining)


def halve_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Keep every second frame and the last one; the total time stays the same."""
    *body, last = frames
    pairs = [body[i : i + 2] for i in range(0, len(body), 2)]
    return [Frame(pair[0].picture, sum(f.seconds for f in pair)) for pair in pairs] + [last]


def _encode_palette_gif(frames: Sequence[Frame], colours: int) -> bytes:
    palette = _make_palette([frame.picture for frame in frames], colours)
    # No dithering: noise that differs between frames makes GIFs large.
    flat = [frame.picture.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    flat[0].save(
        buffer,
        "GIF",
        save_all=True,
        append_images=flat[1:],
        duration=[10 * ticks for ticks in round_to_centiseconds([f.seconds for f in frames])],
        loop=0,
        optimize=True,
    )
    return buffer.getvalue()


def round_to_centiseconds(seconds: Sequence[float]) -> list[int]:
    """Round durations to hundredths of a second, without accumulating errors."""
    ends = np.round(100.0 * np.cumsum([0.0, *seconds]) + 1e-6).astype(int)
    return [max(2, int(end - begin)) for begin, end in pairwise(ends)]


def _make_palette(pictures: Sequence[Image.Image], colours: int) -> Image.Image:
    """Choose the colours of a whole video from a sample of the pixels of every frame."""
    width, height = pictures[0].size
    scale = min(1.0, (_SAMPLED_PIXELS / (len(pictures) * width * height)) ** 0.5)
    size = (max(1, int(width * scale)), max(1, int(height * scale)))
    mosaic = Image.new("RGB", (size[0], size[1] * len(pictures)))
    for row, picture in enumerate(pictures):
        mosaic.paste(picture.resize(size, Image.Resampling.NEAREST), (0, row * size[1]))
    return mosaic.quantize(colours, method=Image.Quantize.MEDIANCUT)


def encode_mp4(frames: Sequence[Frame], fps: float) -> bytes:
    """Encode H.264 video at a constant frame rate; repeat frames that last longer."""
    import imageio_ffmpeg

    width, height = frames[0].picture.size
    size = (width + width % 2, height + height % 2)
    with tempfile.TemporaryDirectory(prefix="rlflame-") as folder:
        path = Path(folder) / "video.mp4"
        writer = imageio_ffmpeg.write_frames(
            str(path), size, fps=fps, quality=7, macro_block_size=2, ffmpeg_log_level="error"
        )
        writer.send(None)
        try:
            for frame in frames:
                canvas = Image.new("RGB", size)
                canvas.paste(frame.picture)
                for _ in range(max(1, round(frame.seconds * fps))):
                    writer.send(canvas.tobytes())
        finally:
            writer.close()
        return path.read_bytes()


def encode_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
