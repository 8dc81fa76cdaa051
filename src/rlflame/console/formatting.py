"""Words in lines and columns, as wide as the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from rlflame.terminal_text import escape_line

#: A text that has less room beside its word stands below it.
_MIN_TEXT_COLUMNS = 28


def format_pairs(
    pairs: Sequence[tuple[str, str]], columns: int | None = None, word_columns: int = 0
) -> list[str]:
    """Words with their texts beside them, or below them where there is no room."""
    columns = columns or find_terminal_columns()
    pairs = [(escape_line(word), escape_line(text)) for word, text in pairs]
    width = max(word_columns, *(len(word) for word, _ in pairs))
    is_beside = columns is None or columns - width - 4 >= _MIN_TEXT_COLUMNS
    indent = " " * (width + 4 if is_beside else 4)
    lines = []
    for word, text in pairs:
        # A command stays in one line, so that it can be copied.
        block = indent + text if is_command(text) else wrap_text(text, columns, indent)
        lines += [f"  {word:{width}}  {block.lstrip()}"] if is_beside else [f"  {word}", block]
    return lines


def is_command(text: str) -> bool:
    """Whether the text is there to be typed."""
    return text.startswith("rlflame ")


def wrap_text(text: str, columns: int | None = None, indent: str = "") -> str:
    """The text in lines no longer than the terminal is wide, all but the first further in."""
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
    """The width of the terminal that standard output goes to; None where it goes elsewhere."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def format_table(rows: Sequence[tuple[str, ...]], columns: int | None = None) -> list[str]:
    """A line for each row; of a table that is too wide for the columns, the first cells alone."""
    rows = [tuple(escape_line(cell) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while columns is not None and sum(widths) + 2 * (len(widths) - 1) > columns:
        widths.pop()
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
