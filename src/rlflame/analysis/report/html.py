"""A report as one HTML file that needs nothing else. Must not know: where its words come from."""

from __future__ import annotations

from html import escape

from rlflame.analysis.plots import svg_backend
from rlflame.analysis.plots.chart import COLOURS, Chart
from rlflame.analysis.report.document import Block, Commands, Document, Section, Table
from rlflame.terminal_text import escape_controls

#: On a dark page the same hues, lighter.
_DARK = ("#56a8e8", "#f0894a", "#3fc79a", "#e0a0c4", "#f0b840", "#8fd0f5", "#b0b0b0")
_STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c2126;--quiet:#5b6570;--rule:#dfe3e8;
--stripe:#f5f7f9}
@media(prefers-color-scheme:dark){:root{--page:#14181c;--ink:#e6eaee;--quiet:#9aa5b0;
--rule:#2e353c;--stripe:#1b2026;DARK}}
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
_LONG = 40


def to_html(document: Document) -> str:
    dark = ";".join(f"--line-{i}:{colour}" for i, colour in enumerate(_DARK[: len(COLOURS)]))
    body = "\n".join(_render_section(section) for section in document.sections)
    title = escape(document.title)
    return escape_controls(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE.replace('DARK', dark)}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{title}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _render_section(section: Section) -> str:
    charts = [block for block in section.blocks if isinstance(block, Chart)]
    parts = [_render_block(block) for block in section.blocks if not isinstance(block, Chart)]
    if charts:
        parts.append(f'<div class="figures">{"".join(map(_render_figure, charts))}</div>')
    return f"<section>\n<h2>{escape(section.title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _render_block(block: Block) -> str:
    if isinstance(block, Table):
        return _render_table(block)
    if isinstance(block, Commands):
        return f"<pre>{escape(chr(10).join(block.lines))}</pre>"
    return f"<p>{escape(str(block))}</p>"


def _render_table(table: Table) -> str:
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


def _render_figure(chart: Chart) -> str:
    names = "".join(
        f'<li><i style="background:{svg_backend.format_colour(i)}"></i>{escape(series.label)}</li>'
        for i, series in enumerate(chart.series)
    )
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    return (
        f"<figure>{svg_backend.render_svg(chart)}<figcaption><strong>{escape(chart.title)}</strong>"
        f'<ul class="names">{names}</ul>{note}</figcaption></figure>'
    )
