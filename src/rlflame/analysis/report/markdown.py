"""A report as Markdown that also reads as text. Must not know: where its words come from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlflame.analysis.plots import terminal_backend
from rlflame.analysis.plots.chart import Chart
from rlflame.analysis.report.document import Block, Commands, Document, Table
from rlflame.terminal_text import escape_controls, escape_line

#: What begins code, HTML or the target of a link, and a backslash that would undo an escape.
_MARKUP = re.compile(r"[`<]|(?<=\])[(\[:]|\\(?=[!-/:-@\[-`{-~])")


def to_markdown(document: Document, *, ascii_only: bool = False) -> str:
    lines = [f"# {_escape_markup(document.title)}"]
    for section in document.sections:
        lines += ["", f"## {_escape_markup(section.title)}"]
        for block in section.blocks:
            lines += ["", *_render_block(block, ascii_only)]
    return escape_controls("\n".join(lines) + "\n")


def _escape_markup(text: str) -> str:
    """The text in one line, without the markup that names may hold."""
    return _MARKUP.sub(r"\\\g<0>", escape_line(text))


def _fence_lines(lines: Sequence[str]) -> list[str]:
    """A block of code whose fence is longer than any run of backticks in it."""
    runs = (len(run) for line in lines for run in re.findall("`+", line))
    fence = "`" * max(3, *(run + 1 for run in runs), 0)
    return [fence, *lines, fence]


def _render_block(block: Block, ascii_only: bool) -> list[str]:
    if isinstance(block, Table):
        return _render_table(block, {"±": "+-"} if ascii_only else {})
    if isinstance(block, Chart):
        return _fence_lines([terminal_backend.render_text(block, 80, 14, braille=not ascii_only)])
    if isinstance(block, Commands):
        return _fence_lines([escape_line(line) for line in block.lines])
    return [_escape_markup(block)]


def _render_table(table: Table, replacements: Mapping[str, str]) -> list[str]:
    """Columns as wide as they need to be, so that the source is a table too."""
    # Escaped before the widths are measured.
    letters = str.maketrans({"|": "\\|", **replacements})
    rows = [
        [escape_controls(_escape_markup(cell)).translate(letters) for cell in row]
        for row in (table.head, *table.rows)
    ]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = [
        "-" * width if i < table.words else "-" * (width - 1) + ":"
        for i, width in enumerate(widths)
    ]
    return [
        "| " + " | ".join(_pad_cell(cell, widths[i], i, table) for i, cell in enumerate(row)) + " |"
        for row in (rows[0], rule, *rows[1:])
    ]


def _pad_cell(cell: str, width: int, column: int, table: Table) -> str:
    return cell.ljust(width) if column < table.words else cell.rjust(width)
