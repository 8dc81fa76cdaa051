"""A chart in characters, for terminals and for text files.

Lines are drawn in Braille dots, two by four to a character. A letter every few columns tells which
line it is, so that nothing hangs on colour; where the output has no Braille, letters draw it all.
"""

from __future__ import annotations

import itertools
import string
import textwrap
from collections.abc import Sequence

import numpy as np

from rlflame.analysis.plots.chart import (
    BarGroups,
    Bars,
    Chart,
    Panels,
    Plot,
    Series,
    format_compact,
    make_ticks,
)
from rlflame.rollout.task import Float64
from rlflame.terminal_text import escape_line

#: Beyond these, and the letters of all languages, nothing is drawn.
SYMBOLS = "\u28ff└─┬│█┊"
#: The bit of each dot in U+2800, by row and column.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_BLANK = 0x2800
_LETTER_EVERY = 14
_WIDEST_LABEL = 8
_NARROW = 60
_SHORTEST_BARS = 20


def render_text(plot: Plot, width: int = 80, height: int = 20, *, braille: bool = True) -> str:
    """Lines no wider than `width`, if that is 12 at least; `height` counts those of a plot."""
    if isinstance(plot, Bars):
        parts = [_render_bars(plot, width, braille)]
    elif isinstance(plot, BarGroups):
        parts = [
            _wrap(plot.title, width),
            *(_render_bars(bars, width, braille) for bars in plot.bars),
            _wrap(plot.note, width),
        ]
    else:
        panels = plot if isinstance(plot, Panels) else Panels((plot,), plot.line_note)
        parts = [
            _render_chart(chart, numbers, width, height, braille)
            for chart, numbers in zip(panels.charts, panels.number_lines(), strict=True)
        ]
        # Bands are not drawn, so their note is left out.
        notes = [panels.line_note, plot.remark]
        parts += [_wrap(note, width, "  ") for note in notes if note]
    return "\n\n".join(parts)


def _wrap(message: str, width: int, prefix: str = "", indent: str = "") -> str:
    """The words in as many lines as it takes, all but the first further in."""
    room = max(1, width - len(prefix))
    lines = textwrap.wrap(
        escape_line(message), room, subsequent_indent=indent, break_on_hyphens=False
    ) or [""]
    return "\n".join(f"{prefix}{line}" for line in lines)


def _render_chart(
    chart: Chart, numbers: Sequence[int], width: int, height: int, braille: bool
) -> str:
    left, right, low, high = chart.compute_bounds()
    upright = {
        tick: format_compact(tick)[:_WIDEST_LABEL] for tick in make_ticks(low, high, height // 3)
    }
    # A wide plot has its axis where any other of its width has it; a narrow one needs the room.
    margin = _WIDEST_LABEL if width >= _NARROW else max(map(len, upright.values()), default=0)
    columns = max(8, width - margin - 2)
    canvas = _Canvas(columns, height, (left, right), (low, high))
    for number, series in zip(numbers, chart.series, strict=True):
        canvas.draw(series, number)
    bar, corner, across, notch = "│└─┬" if braille else "|+-+"
    labels = {canvas.find_row(tick): label for tick, label in upright.items()}
    margin_text = " " * (margin + 1)
    lines = [_wrap(chart.title, width), "", _wrap(chart.y_label, width, margin_text)]
    for row, cells in enumerate(canvas.format_rows(braille)):
        lines.append(f"{labels.get(row, ''):>{margin}} {bar}{cells}".rstrip())
    rule, under = [across] * columns, ""
    for tick in make_ticks(left, right, max(2, columns // 14)):
        column, word = canvas.find_column(tick), format_compact(tick)
        rule[column] = notch
        start = max(0, min(column - len(word) // 2, columns - len(word)))
        if not under or start > len(under):
            under = under.ljust(start) + word
    lines.append(f"{margin_text}{corner}{''.join(rule)}")
    lines.append(f"{margin_text} {under}".rstrip())
    lines.append(_wrap(chart.x_label, width, f"{margin_text} "))
    lines.append("")
    for number, series in zip(numbers, chart.series, strict=True):
        lines.append(
            _wrap(f"{_format_letter(number)}  {_format_label(series)}", width, "  ", "   ")
        )
    return "\n".join(lines)


def _format_label(series: Series) -> str:
    if not series.average_of:
        return series.label
    if not len(series.x):
        return f"{series.label}, every episode"
    return f"{series.label}, mean of the last {series.average_of} episodes"


def _format_letter(number: int) -> str:
    return string.ascii_uppercase[number % 26]


class _Canvas:
    """A grid of dots, two by four to a character, and who drew last in each character."""

    def __init__(
        self, columns: int, rows: int, x: tuple[float, float], y: tuple[float, float]
    ) -> None:
        self._x, self._y = x, y
        self._bits = np.zeros((rows, columns), np.int64)
        self._owner = np.full((rows, columns), -1)
        self._letters: dict[tuple[int, int], int] = {}

    def find_column(self, x: float) -> int:
        return int(self._scale_x(np.array(x))) // 2

    def find_row(self, y: float) -> int:
        return int(self._scale_y(np.array(y))) // 4

    def draw(self, series: Series, number: int) -> None:
        """The line; the dots themselves where there are too few for one."""
        if not len(series.x):
            if series.dots is not None:
                self._mark(self._scale(*series.dots), number)
            return
        ends = self._scale(series.x, series.y)
        self._mark(ends, number)
        for start, end in itertools.pairwise(ends):
            points = int(np.abs(end - start).max()) + 1
            self._mark(np.rint(np.linspace(start, end, points)).astype(int), number)
        # Staggered, so that lines on top of each other still show all their letters.
        columns = self._owner.shape[1]
        for column in range(3 + 4 * number % _LETTER_EVERY, columns, _LETTER_EVERY):
            rows = np.flatnonzero(self._owner[:, column] == number)
            if len(rows):
                self._letters[int(rows[0]), column] = number

    def format_rows(self, braille: bool) -> list[str]:
        rows, columns = self._owner.shape
        return [
            "".join(self._format_cell(row, column, braille) for column in range(columns))
            for row in range(rows)
        ]

    def _format_cell(self, row: int, column: int, braille: bool) -> str:
        bits, letter = int(self._bits[row, column]), self._letters.get((row, column))
        if letter is None and not braille and bits:
            letter = int(self._owner[row, column])
        if letter is not None:
            return _format_letter(letter)
        return chr(_BLANK + bits) if bits else " "

    def _scale(self, x: Float64, y: Float64) -> np.ndarray:
        """The dots of points, each as its place across and down."""
        return np.stack([self._scale_x(x), self._scale_y(y)], axis=1)

    def _mark(self, points: np.ndarray, number: int) -> None:
        across, down = points.T
        np.bitwise_or.at(self._bits, (down // 4, across // 2), _DOTS[down % 4, across % 2])
        self._owner[down // 4, across // 2] = number

    def _scale_x(self, x: Float64) -> np.ndarray:
        return _scale(x, *self._x, 2 * self._owner.shape[1] - 1)

    def _scale_y(self, y: Float64) -> np.ndarray:
        last = 4 * self._owner.shape[0] - 1
        return last - _scale(y, *self._y, last)


def _scale(values: Float64, low: float, high: float, last: int) -> np.ndarray:
    """From [low, high] to whole numbers from 0 to last."""
    return np.clip(np.rint((values - low) / (high - low) * last), 0, last).astype(int)


def _render_bars(bars: Bars, width: int, braille: bool) -> str:
    block, mark = ("█", "┊") if braille else ("#", ":")
    entries = [
        (
            escape_line(f"{group} {name}" if len(bars.names) > 1 else group),
            bars.heights[j, i],
            bars.ideal[i],
        )
        for i, group in enumerate(bars.groups)
        for j, name in enumerate(bars.names)
        if not np.isnan(bars.heights[j, i])
    ]
    values = [f"{height:.2f}x" for _, height, _ in entries]
    label_width, value_width = max(len(label) for label, _, _ in entries), max(map(len, values))
    # Where bars would be too short beside their names, they are below them.
    is_inline = width - label_width - value_width - 3 >= _SHORTEST_BARS
    room = width - value_width - (label_width + 3 if is_inline else 4)
    scale = room / max(max(height, ideal) for _, height, ideal in entries)
    lines = [_wrap(bars.title, width), ""]
    lines.append(_wrap(f"{bars.x_label}: {bars.y_label} ({mark} ideal)", width))
    for (label, height, ideal), value in zip(entries, values, strict=True):
        line = list((block * round(height * scale)).ljust(room + 1))
        line[min(room, round(ideal * scale))] = mark
        if not is_inline:
            lines.append(_wrap(label, width))
        name = f"{label:>{label_width}}" if is_inline else " "
        lines.append(f"{name} {''.join(line)} {value:>{value_width}}")
    return "\n".join([*lines, *([_wrap(bars.note, width)] if bars.note else [])])
