"""A report as Markdown that also reads as text. Must not know: where its words come from."""

from __future__ import annotations

from rlflame.plot import Chart, terminal
from rlflame.report import Block, Commands, Document, Table


def written(document: Document, *, braille: bool = True) -> str:
    lines = [f"# {document.title}"]
    for section in document.sections:
        lines += ["", f"## {section.title}"]
        for block in section.blocks:
            lines += ["", *_lines(block, braille)]
    return "\n".join(lines) + "\n"


def _lines(block: Block, braille: bool) -> list[str]:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Chart):
        return ["```", terminal.text(block, 80, 14, braille=braille), "```"]
    if isinstance(block, Commands):
        return ["```", *block.lines, "```"]
    return [block]


def _table(table: Table) -> list[str]:
    """Columns as wide as they need to be, so that the source is a table too."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (table.head, *table.rows)]
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
