"""Frames as the bytes of a file: GIF, MP4, PNG."""

from __future__ import annotations

import importlib.util
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from rlflame.errors import ConfigError

#: Viewers show shorter frames at a tenth of their speed.
_SHORTEST_GIF_S = 0.02
#: One colour is left for what has not changed since the frame before.
COLOURS = (255, 127, 63)
_SLOWEST_FPS = 8.0
_SAMPLED_PIXELS = 1_000_000


@dataclass(frozen=True, slots=True)
class Frame:
    """A picture and how long it stays."""

    picture: Image.Image
    seconds: float


def check_video() -> None:
    """Refuse MP4 without its extra, before anything is drawn."""
    try:
        missing = importlib.util.find_spec("imageio_ffmpeg") is None
    except ValueError:  # another module was put in its place
        missing = True
    if missing:
        raise ConfigError(
            "imageio-ffmpeg is not installed, so no .mp4 can be written.",
            "pip install 'rlflame[video]', or -o with a name that ends .gif",
        )


def encode_gif(frames: Sequence[Frame], max_bytes: int | None) -> tuple[bytes, int]:
    """An endless GIF with one palette, and how many frames it has.

    Where it must be small, colours go first and then every second frame, in turns.
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
    """Every second frame and the last, over the same time."""
    *body, last = frames
    pairs = [body[i : i + 2] for i in range(0, len(body), 2)]
    return [Frame(pair[0].picture, sum(f.seconds for f in pair)) for pair in pairs] + [last]


def _encode_palette_gif(frames: Sequence[Frame], colours: int) -> bytes:
    palette = _make_palette([frame.picture for frame in frames], colours)
    # Without dithering: noise that differs from frame to frame is what makes GIFs large.
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
    """Whole hundredths that keep pace with the true time: no rounding adds up."""
    ends = np.round(100.0 * np.cumsum([0.0, *seconds]) + 1e-6).astype(int)
    return [max(2, int(end - begin)) for begin, end in pairwise(ends)]


def _make_palette(pictures: Sequence[Image.Image], colours: int) -> Image.Image:
    """The colours of a whole film, from a share of the pixels of every frame."""
    width, height = pictures[0].size
    scale = min(1.0, (_SAMPLED_PIXELS / (len(pictures) * width * height)) ** 0.5)
    size = (max(1, int(width * scale)), max(1, int(height * scale)))
    mosaic = Image.new("RGB", (size[0], size[1] * len(pictures)))
    for row, picture in enumerate(pictures):
        mosaic.paste(picture.resize(size, Image.Resampling.NEAREST), (0, row * size[1]))
    return mosaic.quantize(colours, method=Image.Quantize.MEDIANCUT)


def check_gif_rate(fps: float) -> None:
    if fps * _SHORTEST_GIF_S > 1.0 + 1e-9:
        raise ConfigError(
            f"--fps {fps:g} is more than viewers show of a GIF.", "--fps 50, or -o with .mp4"
        )


def encode_mp4(frames: Sequence[Frame], fps: float) -> bytes:
    """H.264 at a constant rate; a frame that stays longer is repeated."""
    import imageio_ffmpeg

    width, height = frames[0].picture.size
    even = (width + width % 2, height + height % 2)
    with tempfile.TemporaryDirectory(prefix="rlflame-") as folder:
        path = Path(folder) / "film.mp4"
        writer = imageio_ffmpeg.write_frames(
            str(path), even, fps=fps, quality=7, macro_block_size=2, ffmpeg_log_level="error"
        )
        writer.send(None)
        try:
            for frame in frames:
                padded = Image.new("RGB", even)
                padded.paste(frame.picture)
                for _ in range(max(1, round(frame.seconds * fps))):
                    writer.send(padded.tobytes())
        finally:
            writer.close()
        return path.read_bytes()


def encode_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
