"""Words in lines and columns, as wide as a terminal is. Must not know: what they say."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from rlflame.terminal_text import escape_line

#: What is said beside a word needs so much room, or it stands below it.
_MIN_TEXT_COLUMNS = 28


def format_pairs(pairs: Sequence[tuple[str, str]], columns: int | None = None) -> list[str]:
    """Words, and beside them what there is to say; below them where that has no room."""
    columns = columns or find_terminal_columns()
    pairs = [(escape_line(word), escape_line(text)) for word, text in pairs]
    width = max(len(word) for word, _ in pairs)
    has_two_columns = columns is None or columns - width - 4 >= _MIN_TEXT_COLUMNS
    indent = " " * (width + 4 if has_two_columns else 4)
    output_lines = []
    for word, text in pairs:
        # A command stays in one line, so that it can be copied.
        text_lines = indent + text if is_command(text) else wrap_text(text, columns, indent)
        output_lines += (
            [f"  {word:{width}}  {text_lines.lstrip()}"]
            if has_two_columns
            else [f"  {word}", text_lines]
        )
    return output_lines


def is_command(text: str) -> bool:
    """What is there to be typed."""
    return text.startswith("rlflame ")


def wrap_text(text: str, columns: int | None = None, indent: str = "") -> str:
    """In lines no longer than a terminal is wide, all but the first further in."""
    columns = columns or find_terminal_columns()
    text = escape_line(text)
    if columns is None or len(indent + text) <= columns:
        return indent + text
    hanging_indent = indent or "  "
    return textwrap.fill(
        " ".join(text.split()),
        max(columns, len(hanging_indent) + 1),
        initial_indent=indent,
        subsequent_indent=hanging_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def find_terminal_columns() -> int | None:
    """How wide the terminal is that standard output goes to; None where it goes elsewhere."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def format_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need to be, and each row a line, whatever folders are called."""
    rows = [tuple(escape_line(cell) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
