"""A chart in characters, for terminals and for text files. Must not know: runs, terminals.

Lines are drawn in Braille dots, two by four to a character. A letter every few columns tells which
line it is, so that nothing hangs on colour; where the output has no Braille, letters draw it all.
"""

from __future__ import annotations

import string
import textwrap
from collections.abc import Sequence

import numpy as np

from rlflame.analysis.plots.chart import Bars, Cases, Chart, Drawing, Panels, Series, short, ticks
from rlflame.rollout.spec import Float64
from rlflame.text import escape_line

#: Beyond these, and the letters of all languages, nothing is drawn.
SYMBOLS = "\u28ff└─┬│█┊"
#: The bit of each dot in U+2800, by row and column.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_BLANK = 0x2800
_LETTER_EVERY = 14
_WIDEST_LABEL = 8
_NARROW = 60
_SHORTEST_BARS = 20


def text(drawing: Drawing, width: int = 80, height: int = 20, *, braille: bool = True) -> str:
    """Lines no wider than `width`, if that is 12 at least; `height` counts those of a plot."""
    if isinstance(drawing, Bars):
        parts = [_bars(drawing, width, braille)]
    elif isinstance(drawing, Cases):
        parts = [
            _wrapped(drawing.title, width),
            *(_bars(bars, width, braille) for bars in drawing.bars),
            _wrapped(drawing.note, width),
        ]
    else:
        panels = drawing if isinstance(drawing, Panels) else Panels((drawing,), drawing.line_note)
        parts = [
            _chart(chart, numbers, width, height, braille)
            for chart, numbers in zip(panels.charts, panels.numbers(), strict=True)
        ]
        # Bands are not drawn, and so nothing is said of them.
        notes = [panels.line_note, drawing.remark]
        parts += [_wrapped(note, width, "  ") for note in notes if note]
    return "\n\n".join(parts)


def _wrapped(said: str, width: int, before: str = "", further: str = "") -> str:
    """The words in as many lines as it takes, all but the first further in."""
    room = max(1, width - len(before))
    lines = textwrap.wrap(
        escape_line(said), room, subsequent_indent=further, break_on_hyphens=False
    ) or [""]
    return "\n".join(f"{before}{line}" for line in lines)


def _chart(chart: Chart, numbers: Sequence[int], width: int, height: int, braille: bool) -> str:
    left, right, low, high = chart.bounds()
    upright = {tick: short(tick)[:_WIDEST_LABEL] for tick in ticks(low, high, height // 3)}
    # A wide plot has its axis where any other of its width has it; a narrow one needs the room.
    margin = _WIDEST_LABEL if width >= _NARROW else max(map(len, upright.values()), default=0)
    columns = max(8, width - margin - 2)
    canvas = _Canvas(columns, height, (left, right), (low, high))
    for number, series in zip(numbers, chart.series, strict=True):
        canvas.draw(series, number)
    bar, corner, across, notch = "│└─┬" if braille else "|+-+"
    labels = {canvas.row(tick): label for tick, label in upright.items()}
    before = " " * (margin + 1)
    lines = [_wrapped(chart.title, width), "", _wrapped(chart.y_label, width, before)]
    for row, cells in enumerate(canvas.rows(braille)):
        lines.append(f"{labels.get(row, ''):>{margin}} {bar}{cells}".rstrip())
    rule, under = [across] * columns, ""
    for tick in ticks(left, right, max(2, columns // 14)):
        column, word = canvas.column(tick), short(tick)
        rule[column] = notch
        start = max(0, min(column - len(word) // 2, columns - len(word)))
        if not under or start > len(under):
            under = under.ljust(start) + word
    lines.append(f"{before}{corner}{''.join(rule)}")
    lines.append(f"{before} {under}".rstrip())
    lines.append(_wrapped(chart.x_label, width, f"{before} "))
    lines.append("")
    for number, series in zip(numbers, chart.series, strict=True):
        lines.append(_wrapped(f"{_letter(number)}  {_named(series)}", width, "  ", "   "))
    return "\n".join(lines)


def _named(series: Series) -> str:
    if not series.average_of:
        return series.label
    if not len(series.x):
        return f"{series.label}, every episode"
    return f"{series.label}, mean of the last {series.average_of} episodes"


def _letter(number: int) -> str:
    return string.ascii_uppercase[number % 26]


class _Canvas:
    """A grid of dots, two by four to a character, and who drew last in each character."""

    def __init__(
        self, columns: int, rows: int, x: tuple[float, float], y: tuple[float, float]
    ) -> None:
        self._columns, self._rows, self._x, self._y = columns, rows, x, y
        self._bits = np.zeros((rows, columns), np.int64)
        self._owner = np.full((rows, columns), -1)
        self._letters: dict[tuple[int, int], int] = {}

    def column(self, x: float) -> int:
        return int(self._across(np.array([x]))[0]) // 2

    def row(self, y: float) -> int:
        return int(self._down(np.array([y]))[0]) // 4

    def draw(self, series: Series, number: int) -> None:
        """The line; the dots themselves where there are too few for one."""
        if not len(series.x):
            if series.dots is not None:
                self._mark(self._across(series.dots[0]), self._down(series.dots[1]), number)
            return
        across, down = self._across(series.x), self._down(series.y)
        for i in range(len(across) - 1):
            points = max(abs(across[i + 1] - across[i]), abs(down[i + 1] - down[i])) + 1
            self._mark(
                np.rint(np.linspace(across[i], across[i + 1], points)).astype(int),
                np.rint(np.linspace(down[i], down[i + 1], points)).astype(int),
                number,
            )
        self._mark(across, down, number)
        # Staggered, so that lines on top of each other still show all their letters.
        for column in range(3 + 4 * number % _LETTER_EVERY, self._columns, _LETTER_EVERY):
            rows = np.flatnonzero(self._owner[:, column] == number)
            if len(rows):
                self._letters[int(rows[0]), column] = number

    def rows(self, braille: bool) -> list[str]:
        lines = []
        for row in range(self._rows):
            line = ""
            for column in range(self._columns):
                letter = self._letters.get((row, column))
                if letter is None and not braille and self._bits[row, column]:
                    letter = int(self._owner[row, column])
                if letter is not None:
                    line += _letter(letter)
                else:
                    bits = int(self._bits[row, column])
                    line += chr(_BLANK + bits) if bits else " "
            lines.append(line)
        return lines

    def _mark(self, across: np.ndarray, down: np.ndarray, number: int) -> None:
        np.bitwise_or.at(self._bits, (down // 4, across // 2), _DOTS[down % 4, across % 2])
        self._owner[down // 4, across // 2] = number

    def _across(self, x: Float64) -> np.ndarray:
        return _scaled(x, *self._x, 2 * self._columns - 1)

    def _down(self, y: Float64) -> np.ndarray:
        last = 4 * self._rows - 1
        return last - _scaled(y, *self._y, last)


def _scaled(values: Float64, low: float, high: float, last: int) -> np.ndarray:
    """From [low, high] to whole numbers from 0 to last."""
    return np.clip(np.rint((values - low) / (high - low) * last), 0, last).astype(int)


def _bars(bars: Bars, width: int, braille: bool) -> str:
    block, mark = ("█", "┊") if braille else ("#", ":")
    named = [
        (
            escape_line(f"{group} {name}" if len(bars.names) > 1 else group),
            bars.heights[j, i],
            bars.ideal[i],
        )
        for i, group in enumerate(bars.groups)
        for j, name in enumerate(bars.names)
        if not np.isnan(bars.heights[j, i])
    ]
    values = [f"{height:.2f}x" for _, height, _ in named]
    label_width, value_width = max(len(label) for label, _, _ in named), max(map(len, values))
    # Where bars would be too short beside their names, they are below them.
    beside = width - label_width - value_width - 3 >= _SHORTEST_BARS
    room = width - value_width - (label_width + 3 if beside else 4)
    scale = room / max(max(height, ideal) for _, height, ideal in named)
    lines = [_wrapped(bars.title, width), ""]
    lines.append(_wrapped(f"{bars.x_label}: {bars.y_label} ({mark} ideal)", width))
    for (label, height, ideal), value in zip(named, values, strict=True):
        line = list((block * round(height * scale)).ljust(room + 1))
        line[min(room, round(ideal * scale))] = mark
        if not beside:
            lines.append(_wrapped(label, width))
        name = f"{label:>{label_width}}" if beside else " "
        lines.append(f"{name} {''.join(line)} {value:>{value_width}}")
    return "\n".join([*lines, *([_wrapped(bars.note, width)] if bars.note else [])])
