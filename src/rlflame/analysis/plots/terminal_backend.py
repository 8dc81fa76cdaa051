"""Draws charts as text, for terminals and text files.

Lines are drawn with Braille characters, which have two by four dots. A letter every few columns
identifies the line, so that no colour is needed. If the output cannot show Braille, lines are drawn
with letters.
"""

from __future__ import annotations

import itertools
import string
import textwrap
from collections.abc import Sequence

import numpy as np

from rlflame.analysis.plots.chart import (
    Bars,
    Chart,
    Plot,
    Series,
    collect_panels,
    format_compact,
    make_ticks,
)
from rlflame.rollout.task import Float64
from rlflame.terminal_text import escape_line

#: The characters that a plot consists of, apart from letters.
SYMBOLS = "\u28ff└─┬│█┊"
#: The bit that each dot adds to U+2800, by row and column.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_BLANK = 0x2800
_LETTER_EVERY, _FIRST_LETTER = 14, 3
_WIDEST_LABEL = 8
_NARROW = 60


def render_text(plot: Plot, width: int = 80, height: int = 20, *, braille: bool = True) -> str:
    """Render a plot as text that is at most `width` columns wide.

    `width` must be at least 12. The plot area of each line chart is `height` rows high.
    """
    panels = collect_panels(plot)
    blocks = [_wrap(panels.title, width)] if panels.title else []
    for part, numbers in zip(panels.parts, panels.number_lines(), strict=True):
        if isinstance(part, Bars):
            blocks.append(_render_bars(part, width, braille))
        else:
            blocks.append(_render_chart(part, numbers, width, height, braille))
    if panels.notes:
        blocks.append(_wrap(" ".join(panels.notes), width, "  "))
    return "\n\n".join(blocks)


def _wrap(message: str, width: int, prefix: str = "", indent: str = "") -> str:
    """Wrap a message to `width` columns; `indent` is for lines after the first."""
    room = max(1, width - len(prefix))
    lines = textwrap.wrap(
        escape_line(message), room, subsequent_indent=indent, break_on_hyphens=False
    ) or [""]
    return "\n".join(f"{prefix}{line}" for line in lines)


def _render_chart(
    chart: Chart, numbers: Sequence[int], width: int, height: int, braille: bool
) -> str:
    x_low, x_high, low, high = bounds = chart.compute_bounds()
    upright = {
        tick: format_compact(tick)[:_WIDEST_LABEL] for tick in make_ticks(low, high, height // 3)
    }
    # Wide plots have a fixed margin, so that their axes align; narrow ones need the room.
    margin = _WIDEST_LABEL if width >= _NARROW else max(map(len, upright.values()), default=0)
    columns = max(8, width - margin - 2)
    bar, corner, across, notch = "│└─┬" if braille else "|+-+"
    labels = {
        height - 1 - int(_scale(tick, low, high, 4 * height - 1)) // 4: label
        for tick, label in upright.items()
    }
    margin_text = " " * (margin + 1)
    lines = [_wrap(chart.title, width), "", _wrap(chart.y_label, width, margin_text)]
    for row, cells in enumerate(_draw_lines(chart, numbers, bounds, (height, columns), braille)):
        lines.append(f"{labels.get(row, ''):>{margin}} {bar}{cells}".rstrip())
    rule, tick_line = [across] * columns, ""
    for tick in make_ticks(x_low, x_high, max(2, columns // 14)):
        column, word = int(_scale(tick, x_low, x_high, 2 * columns - 1)) // 2, format_compact(tick)
        rule[column] = notch
        start = max(0, min(column - len(word) // 2, columns - len(word)))
        if not tick_line or start > len(tick_line):
            tick_line = tick_line.ljust(start) + word
    lines.append(f"{margin_text}{corner}{''.join(rule)}")
    lines.append(f"{margin_text} {tick_line}".rstrip())
    lines.append(_wrap(chart.x_label, width, f"{margin_text} "))
    lines.append("")
    for number, series in zip(numbers, chart.series, strict=True):
        label = f"{_format_letter(number)}  {_format_label(series)}"
        lines.append(_wrap(label, width, "  ", "   "))
    return "\n".join(lines)


def _format_label(series: Series) -> str:
    if not series.average_of:
        return series.label
    if not len(series.x):
        return f"{series.label}, every episode"
    return f"{series.label}, mean over {series.average_of} episodes"


def _format_letter(number: int) -> str:
    return string.ascii_uppercase[number % 26]


def _draw_lines(
    chart: Chart,
    numbers: Sequence[int],
    bounds: tuple[float, float, float, float],
    shape: tuple[int, int],
    braille: bool,
) -> list[str]:
    """Return the rows of the plot; where lines cross, the last line has priority."""
    bits, owner = np.zeros(shape, np.int64), np.full(shape, -1)
    for number, series in zip(numbers, chart.series, strict=True):
        across, down = _list_dots(series, bounds, shape)
        np.bitwise_or.at(bits, (down // 4, across // 2), _DOTS[down % 4, across % 2])
        owner[down // 4, across // 2] = number

    def format_cell(row: int, column: int) -> str:
        number = int(owner[row, column])
        if number < 0:
            return " "
        # Up to seven lines have their letters in different columns, so no letter hides another.
        if not braille or (column - 4 * number) % _LETTER_EVERY == _FIRST_LETTER:
            return _format_letter(number)
        return chr(_BLANK + int(bits[row, column]))

    rows, columns = shape
    return ["".join(format_cell(row, column) for column in range(columns)) for row in range(rows)]


def _list_dots(
    series: Series, bounds: tuple[float, float, float, float], shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the column and row of each Braille dot of a series (its line or dots)."""
    x_low, x_high, low, high = bounds
    x, y = series.dots if series.dots and not len(series.x) else (series.x, series.y)
    across = _scale(x, x_low, x_high, 2 * shape[1] - 1)
    down = 4 * shape[0] - 1 - _scale(y, low, high, 4 * shape[0] - 1)
    if len(series.x):
        ends = itertools.pairwise(zip(across, down, strict=True))
        spans = [np.linspace(*pair, int(np.abs(np.subtract(*pair)).max()) + 1) for pair in ends]
        points = np.rint(np.concatenate([[(across[0], down[0])], *spans])).astype(int)
        across, down = points.T
    return across, down


def _scale(values: Float64 | float, low: float, high: float, last: int) -> np.ndarray:
    """Scale values in [low, high] to integers from 0 to `last`."""
    return np.clip(np.rint((np.asarray(values) - low) / (high - low) * last), 0, last).astype(int)


def _render_bars(bars: Bars, width: int, braille: bool) -> str:
    """Render bars as text, each below its name and height.

    A mark shows the ideal height.
    """
    block, mark = ("█", "┊") if braille else ("#", ":")
    scale = (width - 3) / max(np.nanmax(bars.heights), bars.ideal.max())
    lines = [_wrap(bars.title, width), ""]
    lines.append(_wrap(f"{bars.x_label}: {bars.y_label} ({mark} ideal)", width))
    for i, j in np.ndindex(len(bars.groups), len(bars.names)):
        height = bars.heights[j, i]
        if not np.isnan(height):
            label = f"{bars.groups[i]} {bars.names[j]}" if len(bars.names) > 1 else bars.groups[i]
            line = list((block * round(height * scale)).ljust(width - 2))
            line[round(bars.ideal[i] * scale)] = mark
            lines += [_wrap(f"{label}: {height:.2f}x", width), f"  {''.join(line)}".rstrip()]
    return "\n".join(lines)
