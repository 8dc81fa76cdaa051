"""Words in lines and columns, as wide as a terminal is. Must not know: what they say."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from rlflame.text import escape_line

#: What is said beside a word needs so much room, or it stands below it.
_LEAST_BESIDE = 28


def aligned(lines: Sequence[tuple[str, str]], columns: int | None = None) -> list[str]:
    """Words, and beside them what there is to say; below them where that has no room."""
    columns = columns or terminal_columns()
    lines = [(escape_line(word), escape_line(text)) for word, text in lines]
    width = max(len(word) for word, _ in lines)
    beside = columns is None or columns - width - 4 >= _LEAST_BESIDE
    indent = " " * (width + 4 if beside else 4)
    found = []
    for word, text in lines:
        # A command stays in one line, so that it can be copied.
        said = indent + text if is_command(text) else fitted(text, columns, indent)
        found += [f"  {word:{width}}  {said.lstrip()}"] if beside else [f"  {word}", said]
    return found


def is_command(text: str) -> bool:
    """What is there to be typed."""
    return text.startswith("rlflame ")


def fitted(text: str, columns: int | None = None, indent: str = "") -> str:
    """In lines no longer than a terminal is wide, all but the first further in."""
    columns = columns or terminal_columns()
    text = escape_line(text)
    if columns is None or len(indent + text) <= columns:
        return indent + text
    further = indent or "  "
    return textwrap.fill(
        " ".join(text.split()),
        max(columns, len(further) + 1),
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def terminal_columns() -> int | None:
    """How wide the terminal is that standard output goes to; None where it goes elsewhere."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need to be, and each row a line, whatever folders are called."""
    rows = [tuple(escape_line(cell) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
