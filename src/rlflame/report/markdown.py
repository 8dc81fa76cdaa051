"""A report as Markdown that also reads as text. Must not know: where its words come from."""

from __future__ import annotations

from collections.abc import Mapping

from rlflame.plot import Chart, terminal
from rlflame.report import Block, Commands, Document, Table


def written(document: Document, *, ascii_only: bool = False) -> str:
    lines = [f"# {document.title}"]
    for section in document.sections:
        lines += ["", f"## {section.title}"]
        for block in section.blocks:
            lines += ["", *_lines(block, ascii_only)]
    return "\n".join(lines) + "\n"


def _lines(block: Block, ascii_only: bool) -> list[str]:
    if isinstance(block, Table):
        return _table(block, {"±": "+-"} if ascii_only else {})
    if isinstance(block, Chart):
        return ["```", terminal.text(block, 80, 14, braille=not ascii_only), "```"]
    if isinstance(block, Commands):
        return ["```", *block.lines, "```"]
    return [block]


def _table(table: Table, spelt: Mapping[str, str]) -> list[str]:
    """Columns as wide as they need to be, so that the source is a table too."""
    # Of what a cell may not have, a folder's name may.
    letters = str.maketrans({"|": "\\|", "\n": " ", "\r": " ", **spelt})
    rows = [[cell.translate(letters) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = [
        "-" * width if i < table.words else "-" * (width - 1) + ":"
        for i, width in enumerate(widths)
    ]
    return [
        "| " + " | ".join(_padded(cell, widths[i], i, table) for i, cell in enumerate(row)) + " |"
        for row in (rows[0], rule, *rows[1:])
    ]


def _padded(cell: str, width: int, column: int, table: Table) -> str:
    return cell.ljust(width) if column < table.words else cell.rjust(width)
