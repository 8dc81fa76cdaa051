"""Pictures put together: sized, captioned, side by side. Must not know: environments, files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from rlflame.rollout.spec import Array

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_PAPER = (24, 26, 31)
_INK = (240, 240, 240)
_GAP = 4
#: As wide as a return may get, so that all frames of a film have one layout.
_WIDEST = "return -00,000.0"


def resize_image(picture: Array, width: int | None, height: int | None) -> Image.Image:
    """The picture at the size that is wanted; with one number alone, in its own proportions."""
    image = Image.fromarray(picture)
    own_width, own_height = image.size
    if width is None and height is None:
        return image
    if width is None:
        assert height is not None
        width = max(1, round(own_width * height / own_height))
    if height is None:
        height = max(1, round(own_height * width / own_width))
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)


def can_fit_one_line(captions: Iterable[str], width: int) -> bool:
    """Whether there is room for each of them beside a return."""
    font, _, pad = _make_layout(width)
    longest = max(font.getlength(caption) for caption in captions)
    return longest + font.getlength(_WIDEST) + 3 * pad <= width


def add_caption(
    picture: Array, caption: str, episode_return: float, *, one_line: bool = True
) -> Image.Image:
    """The picture under a line, or two, that say whose it is, and the return until now."""
    image = Image.fromarray(picture)
    width, height = image.size
    font, line, pad = _make_layout(width)
    has_two_lines = not one_line
    return_text = f"return {episode_return:,.1f}"
    head = (2 if has_two_lines else 1) * line
    result = Image.new("RGB", (width, height + head), _PAPER)
    result.paste(image, (0, head))
    draw = ImageDraw.Draw(result)
    draw.text((pad, line // 2), caption, _INK, font, anchor="lm")
    if has_two_lines:
        draw.text((pad, line + line // 2), return_text, _INK, font, anchor="lm")
    else:
        draw.text((width - pad, line // 2), return_text, _INK, font, anchor="rm")
    return result


def join_horizontally(images: Sequence[Image.Image]) -> Image.Image:
    """From left to right, with a gap."""
    width = sum(image.width for image in images) + _GAP * (len(images) - 1)
    result = Image.new("RGB", (width, max(image.height for image in images)), _PAPER)
    x = 0
    for image in images:
        result.paste(image, (x, 0))
        x += image.width + _GAP
    return result


def join_vertically(images: Sequence[Image.Image]) -> Image.Image:
    """From top to bottom, with a gap."""
    height = sum(image.height for image in images) + _GAP * (len(images) - 1)
    result = Image.new("RGB", (max(image.width for image in images), height), _PAPER)
    y = 0
    for image in images:
        result.paste(image, (0, y))
        y += image.height + _GAP
    return result


@cache
def _make_layout(width: int) -> tuple[Font, int, int]:
    """Font, height of a line and margin for a picture of this width."""
    size = max(11, min(22, width // 20))
    return ImageFont.load_default(size), round(1.6 * size), max(2, width // 60)
