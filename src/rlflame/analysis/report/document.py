"""A report as blocks of plain words, written as Markdown that also reads as text, or as a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rlflame.analysis.plots import matplotlib_backend, terminal_backend
from rlflame.analysis.plots.chart import Chart
from rlflame.terminal_text import escape_controls, escape_line

#: What begins code, HTML or the target of a link, and a backslash that would undo an escape.
_MARKUP = re.compile(r"[`<]|(?<=\])[(\[:]|\\(?=[!-/:-@\[-`{-~])")
#: Cells of more letters wrap on a page.
_LONG = 40
_STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c2126;--quiet:#5b6570;--rule:#dfe3e8;
--stripe:#f5f7f9}
@media(prefers-color-scheme:dark){:root{--page:#14181c;--ink:#e6eaee;--quiet:#9aa5b0;
--rule:#2e353c;--stripe:#1b2026;
--line-0:#56a8e8;--line-1:#f0894a;--line-2:#3fc79a;--line-3:#e0a0c4;--line-4:#f0b840;
--line-5:#8fd0f5;--line-6:#b0b0b0}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1160px;margin:0 auto;padding:24px 20px 64px}
h1{font-size:1.7rem;line-height:1.2;margin:.4em 0 .8em}
h2{font-size:1.2rem;margin:2.2em 0 .6em;padding-top:.7em;border-top:1px solid var(--rule)}
p{max-width:46em;color:var(--quiet);margin:.6em 0}
.table{overflow-x:auto;margin:.8em 0;border:1px solid var(--rule);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;text-align:right;white-space:nowrap;vertical-align:top}
.w{text-align:left}
td.long{white-space:normal;min-width:16em}
th{font-weight:600;color:var(--quiet);border-bottom:1px solid var(--rule)}
tbody tr:nth-child(even){background:var(--stripe)}
.figures{display:grid;gap:24px;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}
figure{margin:0;min-width:0}
figure svg{width:100%;height:auto;display:block}
figcaption{font-size:.9rem}
.names{list-style:none;display:flex;flex-wrap:wrap;gap:2px 18px;padding:0;margin:.2em 0}
.names i{display:inline-block;width:18px;height:4px;border-radius:2px;margin-right:7px;
vertical-align:middle}
figcaption p{font-size:.82rem;margin:.3em 0}
pre{overflow-x:auto;background:var(--stripe);border:1px solid var(--rule);border-radius:8px;
padding:12px;font-size:.85rem}
@media(max-width:600px){main{padding:12px 14px 48px}
thead{position:absolute;left:-9999px}
table,tbody,tr,td{display:block}
tr{padding:8px 12px}
td{display:flex;gap:16px;justify-content:space-between;padding:2px 0;white-space:normal;
text-align:right}
td.long{min-width:0}
td:first-child{font-weight:600;text-align:left}
td:not(:first-child)::before{content:attr(data-of);color:var(--quiet);text-align:left;flex:none;
max-width:45%}}
"""


@dataclass(frozen=True)
class Table:
    """Cells as they are to be read; all columns but the first `words` hold numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


def make_table(rows: Sequence[Mapping[str, str]], words: int = 1) -> Table:
    """A table of rows with equal keys, which are its head."""
    return Table(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), words)


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
    sections: tuple[Section, ...] = ()


def to_markdown(document: Document, *, ascii_only: bool = False) -> str:
    lines = [f"# {_escape_markup(document.title)}"]
    for section in document.sections:
        lines += ["", f"## {_escape_markup(section.title)}"]
        for block in section.blocks:
            lines += ["", *_render_markdown_block(block, ascii_only)]
    return escape_controls("\n".join(lines) + "\n")


def _escape_markup(text: str) -> str:
    """The text in one line, without the markup that names may hold."""
    return _MARKUP.sub(r"\\\g<0>", escape_line(text))


def _fence_lines(lines: Sequence[str]) -> list[str]:
    """A block of code whose fence is longer than any run of backticks in it."""
    runs = (len(run) for line in lines for run in re.findall("`+", line))
    fence = "`" * max(3, *(run + 1 for run in runs), 0)
    return [fence, *lines, fence]


def _render_markdown_block(block: Block, ascii_only: bool) -> list[str]:
    if isinstance(block, Table):
        return _render_markdown_table(block, ascii_only)
    if isinstance(block, Chart):
        return _fence_lines([terminal_backend.render_text(block, 80, 14, braille=not ascii_only)])
    if isinstance(block, Commands):
        return _fence_lines([escape_line(line) for line in block.lines])
    return [_escape_markup(block)]


def _render_markdown_table(table: Table, ascii_only: bool) -> list[str]:
    """Columns as wide as they need to be, so that the source is a table too."""
    # Escaped before the widths are measured.
    letters = str.maketrans({"|": "\\|", "±": "+-" if ascii_only else "±"})
    rows = [
        [escape_controls(_escape_markup(cell)).translate(letters) for cell in row]
        for row in (table.head, *table.rows)
    ]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{'<' if i < table.words else '>'}{width}" for i, width in enumerate(widths)]
    rule = ["-" * width for width in widths]
    rule[table.words :] = [dashes[1:] + ":" for dashes in rule[table.words :]]
    return [f"| {' | '.join(map(format, row, formats))} |" for row in (rows[0], rule, *rows[1:])]


def to_html(document: Document) -> str:
    body = "\n".join(_render_section(section) for section in document.sections)
    title = escape(document.title)
    return escape_controls(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{title}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _render_section(section: Section) -> str:
    charts = [block for block in section.blocks if isinstance(block, Chart)]
    parts = [_render_html_block(block) for block in section.blocks if not isinstance(block, Chart)]
    parts += [_render_figures(charts)] if charts else []
    return f"<section>\n<h2>{escape(section.title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _render_html_block(block: Block) -> str:
    if isinstance(block, Table):
        return _render_html_table(block)
    if isinstance(block, Commands):
        return f"<pre>{escape(chr(10).join(block.lines))}</pre>"
    return f"<p>{escape(str(block))}</p>"


def _render_html_table(table: Table) -> str:
    head = "".join(_render_cell("th", cell, i, table) for i, cell in enumerate(table.head))
    rows = "".join(
        f"<tr>{''.join(_render_cell('td', cell, i, table) for i, cell in enumerate(row))}</tr>\n"
        for row in table.rows
    )
    return (
        f'<div class="table" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody>\n</table></div>"
    )


def _render_cell(tag: str, text: str, column: int, table: Table) -> str:
    names = ["w"] * (column < table.words) + ["long"] * (tag == "td" and len(text) > _LONG)
    kind = f' class="{" ".join(names)}"' if names else ""
    if tag == "td":  # on a phone, where a row is a block, each cell says what it is
        kind += f' data-of="{escape(table.head[column], quote=True)}"'
    return f"<{tag}{kind}>{escape(text)}</{tag}>"


def _render_figures(charts: Sequence[Chart]) -> str:
    try:
        matplotlib_backend.check_available()
    except matplotlib_backend.PlotUnavailableError as error:
        return f"<p>{escape(f'{error.message} {error.hint}')}</p>"
    return f'<div class="figures">{"".join(map(_render_figure, charts))}</div>'


def _render_figure(chart: Chart) -> str:
    names = "".join(
        f'<li><i style="background:{matplotlib_backend.format_css_colour(i)}"></i>'
        f"{escape(series.label)}</li>"
        for i, series in enumerate(chart.series)
    )
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    return (
        f"<figure>{matplotlib_backend.render_svg(chart)}<figcaption>"
        f'<strong>{escape(chart.title)}</strong><ul class="names">{names}</ul>{note}'
        "</figcaption></figure>"
    )
