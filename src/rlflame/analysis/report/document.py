"""Defines documents of text, tables and charts; renders them as Markdown or HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rlflame.analysis.plots import matplotlib_backend, terminal_backend
from rlflame.analysis.plots.chart import Chart
from rlflame.statistics import FEWEST_SEEDS, Interval
from rlflame.terminal_text import escape_controls, escape_line

#: The start of code, HTML or a link target, and a backslash that would undo an escape.
_MARKUP = re.compile(r"[`<]|(?<=\])[(\[:]|\\(?=[!-/:-@\[-`{-~])")
_STYLE = """
:root{color-scheme:light dark}
body{max-width:1160px;margin:0 auto;padding:1em;font:1em/1.5 system-ui,sans-serif}
table{display:block;overflow-x:auto;border-collapse:collapse}
th,td{padding:.3em .8em;text-align:right;border-bottom:1px solid #8886}
.w{text-align:left}
svg,pre{max-width:40em;overflow-x:auto}
"""


@dataclass(frozen=True)
class Table:
    """A table of formatted cells: `words` columns of text, then columns of numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


#: A column as (header, key, format), or as one word that is both the header and the key.
Column = str | tuple[str, str, str]


def make_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], words: int = 1
) -> Table:
    """Make a table whose first `words` columns are text.

    A row's `times` is its number of measurements. If there are too few, no intervals are shown.
    """
    triples = [(column, column, "") if isinstance(column, str) else column for column in columns]
    cells = tuple(
        tuple(
            format_value(row.get(key), spec, row.get("times", FEWEST_SEEDS))
            for _, key, spec in triples
        )
        for row in rows
    )
    return Table(tuple(head for head, _, _ in triples), cells, words)


def format_value(value: Any, spec: str = "", times: int = FEWEST_SEEDS) -> str:
    """Format a value for a table.

    The bounds of an Interval are shown if `times` is at least FEWEST_SEEDS. The format `ms` shows
    seconds as milliseconds. A format that ends in `x` shows a factor, such as 1.5x.
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, Interval):
        text = format_value(value.value, spec)
        if times < FEWEST_SEEDS:
            return text
        return f"{text} [{format_value(value.low, spec)}, {format_value(value.high, spec)}]"
    if spec == "ms":
        return f"{1000.0 * value:.2f}"
    return f"{value:{spec.removesuffix('x')}}{'x' if spec.endswith('x') else ''}"


Block = str | Table | Chart


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    title: str
    sections: tuple[Section, ...] = ()


def to_markdown(document: Document, *, ascii_only: bool = False) -> str:
    lines = [f"# {_escape_markup(document.title)}"]
    for section in document.sections:
        lines += ["", f"## {_escape_markup(section.title)}"]
        for block in section.blocks:
            lines += ["", *_render_markdown_block(block, ascii_only)]
    return escape_controls("\n".join(lines) + "\n")


def _escape_markup(text: str) -> str:
    """Return the text as one line, with Markdown markup escaped."""
    return _MARKUP.sub(r"\\\g<0>", escape_line(text))


def _render_markdown_block(block: Block, ascii_only: bool) -> list[str]:
    if isinstance(block, Table):
        return _render_markdown_table(block)
    if isinstance(block, Chart):
        text = terminal_backend.render_text(block, 80, 14, braille=not ascii_only)
        # The fence is longer than any run of backticks in the text.
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
        return [fence, text, fence]
    return [_escape_markup(block)]


def _render_markdown_table(table: Table) -> list[str]:
    """Return the lines of a Markdown table, with padded columns for readability."""
    # Cells are escaped before the widths are measured.
    rows = [
        [escape_controls(_escape_markup(cell)).replace("|", "\\|") for cell in row]
        for row in (table.head, *table.rows)
    ]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{'<' if i < table.words else '>'}{width}" for i, width in enumerate(widths)]
    rule = ["-" * width for width in widths]
    rule[table.words :] = [dashes[1:] + ":" for dashes in rule[table.words :]]
    return [f"| {' | '.join(map(format, row, formats))} |" for row in (rows[0], rule, *rows[1:])]


def to_html(document: Document) -> str:
    lines = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(document.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(document.title)}</h1>",
    ]
    for section in document.sections:
        lines += [f"<h2>{escape(section.title)}</h2>", *map(_render_html_block, section.blocks)]
    return escape_controls("\n".join([*lines, "</body>\n</html>\n"]))


def _render_html_block(block: Block) -> str:
    if isinstance(block, Table):
        rows = [_render_html_row("th", block.head, block.words)]
        rows += [_render_html_row("td", row, block.words) for row in block.rows]
        return "\n".join(["<table>", *rows, "</table>"])
    if isinstance(block, Chart):
        return _render_figure(block)
    return f"<p>{escape(block)}</p>"


def _render_html_row(tag: str, cells: Sequence[str], words: int) -> str:
    kinds = [' class="w"' if i < words else "" for i in range(len(cells))]
    texts = [
        f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, cells, strict=True)
    ]
    return f"<tr>{''.join(texts)}</tr>"


def _render_figure(chart: Chart) -> str:
    """Render a chart as SVG, or as text if matplotlib is not installed."""
    try:
        return f"<figure>{matplotlib_backend.render_svg(chart)}</figure>"
    except matplotlib_backend.PlotUnavailableError:
        return f"<pre>{escape(terminal_backend.render_text(chart, 80, 14))}</pre>"
