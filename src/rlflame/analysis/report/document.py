"""The contract of a report: what it says, as blocks of plain words.

report/data.py finds the numbers, report/text.py makes blocks of them, analysis/report/markdown.py
and report/html.py write blocks down. Must not know: runs, files, formats.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlflame.analysis.plots.chart import Chart


@dataclass(frozen=True)
class Table:
    """Cells as they are to be read; all columns but the first `words` hold numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


@dataclass(frozen=True)
class Commands:
    """What to type."""

    lines: tuple[str, ...]


Block = str | Table | Chart | Commands


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    title: str
    sections: tuple[Section, ...] = field(default_factory=tuple)
