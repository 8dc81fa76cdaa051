"""A chart in characters, for terminals and for text files. Must not know: runs, terminals.

Lines are drawn in Braille dots, two by four to a character. A letter every few columns tells which
line it is, so that nothing hangs on colour; where the output has no Braille, letters draw it all.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np

from rlflame.plot import Bars, Chart, Drawing, Panels, Series, short, ticks
from rlflame.rollout.spec import Float64

#: The bit of each dot in U+2800, by row and column.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_BLANK = 0x2800
_LETTER_EVERY = 14
_WIDEST_LABEL = 8


def text(drawing: Drawing, width: int = 80, height: int = 20, *, braille: bool = True) -> str:
    """Lines no wider than `width`; `height` counts those of a plot itself."""
    if isinstance(drawing, Bars):
        return _bars(drawing, width, braille)
    panels = drawing if isinstance(drawing, Panels) else Panels((drawing,), drawing.line_note)
    parts = [
        _chart(chart, numbers, width, height, braille)
        for chart, numbers in zip(panels.charts, panels.numbers(), strict=True)
    ]
    # Bands are not drawn, and so nothing is said of them.
    return "\n\n".join([*parts, *([f"  {panels.line_note}"] if panels.line_note else [])])


def _chart(chart: Chart, numbers: Sequence[int], width: int, height: int, braille: bool) -> str:
    columns = max(20, width - _WIDEST_LABEL - 2)
    left, right, low, high = chart.bounds()
    canvas = _Canvas(columns, height, (left, right), (low, high))
    for number, series in zip(numbers, chart.series, strict=True):
        canvas.draw(series, number)
    upright, corner, across, notch = "│└─┬" if braille else "|+-+"
    labels = {canvas.row(tick): short(tick) for tick in ticks(low, high, height // 3)}
    lines = [chart.title, "", f"{'':{_WIDEST_LABEL}} {chart.y_label}"]
    for row, cells in enumerate(canvas.rows(braille)):
        label = labels.get(row, "")[:_WIDEST_LABEL]
        lines.append(f"{label:>{_WIDEST_LABEL}} {upright}{cells}".rstrip())
    rule, under = [across] * columns, [" "] * (columns + _WIDEST_LABEL)
    for tick in ticks(left, right, columns // 14):
        column, word = canvas.column(tick), short(tick)
        rule[column] = notch
        start = max(0, min(column - len(word) // 2, columns - len(word)))
        under[start : start + len(word)] = word
    lines.append(f"{'':{_WIDEST_LABEL}} {corner}{''.join(rule)}")
    lines.append(f"{'':{_WIDEST_LABEL}}  {''.join(under)}".rstrip())
    lines.append(f"{'':{_WIDEST_LABEL}}  {chart.x_label}")
    lines.append("")
    named = zip(numbers, chart.series, strict=True)
    lines += [f"  {_letter(number)}  {_named(series)}" for number, series in named]
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
        (f"{group} {name}" if len(bars.names) > 1 else group, bars.heights[j, i], bars.ideal[i])
        for i, group in enumerate(bars.groups)
        for j, name in enumerate(bars.names)
        if not np.isnan(bars.heights[j, i])
    ]
    label_width = max(len(label) for label, _, _ in named)
    room = max(10, width - label_width - 12)
    scale = room / max(max(height, ideal) for _, height, ideal in named)
    lines = [bars.title, "", f"{bars.x_label}: {bars.y_label} ({mark} ideal)"]
    for label, height, ideal in named:
        line = list((block * round(height * scale)).ljust(room + 1))
        line[min(room, round(ideal * scale))] = mark
        lines.append(f"{label:>{label_width}} {''.join(line)} {height:.2f}x")
    return "\n".join([*lines, *([bars.note] if bars.note else [])])
