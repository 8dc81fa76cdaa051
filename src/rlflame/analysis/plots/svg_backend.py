"""A chart as SVG inside a page, without any library; its colours are the page's own.

Text takes `currentColor`, line k the CSS variable `--line-k`, so that a page can be light or dark.
Must not know: runs, pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from rlflame.analysis.plots.chart import COLOURS, Chart, Series, format_compact, make_ticks
from rlflame.rollout.spec import Float64

WIDTH, HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 28, 52
_FONT = 15
#: More points than a screen has pixels would only make the page larger.
_MOST_POINTS = 400


def render_svg(chart: Chart) -> str:
    """One element, as wide as what holds it."""
    left, right, low, high = chart.compute_bounds()
    room = (high - low) * 0.04
    frame = _Frame(left, right, low - room, high + room)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="{_FONT}" '
        f'fill="currentColor" aria-label="{escape(_format_description(chart), quote=True)}">',
        *_render_axes(chart, frame),
    ]
    for number, series in enumerate(chart.series):
        parts += _render_series(series, number, frame)
    return "\n".join([*parts, "</svg>"])


def format_colour(number: int) -> str:
    """The name under which a page may give line `number` another colour."""
    place = number % len(COLOURS)
    return f"var(--line-{place},{COLOURS[place]})"


class _Frame:
    """From numbers to places on the sheet."""

    def __init__(self, left: float, right: float, low: float, high: float) -> None:
        self.x_range, self.y_range = (left, right), (low, high)

    def scale_x(self, values: Float64) -> Float64:
        left, right = self.x_range
        share: Float64 = (values - left) / (right - left)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def scale_y(self, values: Float64) -> Float64:
        low, high = self.y_range
        share: Float64 = (values - low) / (high - low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def format_points(self, x: Float64, y: Float64) -> str:
        places = zip(self.scale_x(x), self.scale_y(y), strict=True)
        return " ".join(f"{across:.1f},{down:.1f}" for across, down in places)


def _render_axes(chart: Chart, frame: _Frame) -> Iterator[str]:
    end, floor = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    for tick in make_ticks(*frame.y_range, 5):
        y = float(frame.scale_y(np.array(tick)))
        yield (
            f'<line x1="{_LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="currentColor" stroke-opacity=".15"/>'
        )
        text = format_compact(tick)
        yield f'<text x="{_LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{text}</text>'
    for tick in make_ticks(*frame.x_range, 5):
        x = float(frame.scale_x(np.array(tick)))
        text = format_compact(tick)
        yield f'<text x="{x:.1f}" y="{floor + 20}" text-anchor="middle">{text}</text>'
    yield (
        f'<line x1="{_LEFT}" x2="{end}" y1="{floor}" y2="{floor}" '
        'stroke="currentColor" stroke-opacity=".6"/>'
    )
    yield f'<text x="{_LEFT}" y="16" fill-opacity=".75">{escape(chart.y_label)}</text>'
    yield (
        f'<text x="{(_LEFT + end) / 2}" y="{HEIGHT - 8}" text-anchor="middle" '
        f'fill-opacity=".75">{escape(chart.x_label)}</text>'
    )


def _render_series(series: Series, number: int, frame: _Frame) -> Iterator[str]:
    ink = format_colour(number)
    if series.dots is not None:
        for x, y in zip(*_subsample(*series.dots), strict=True):
            yield (
                f'<circle cx="{float(frame.scale_x(x)):.1f}" cy="{float(frame.scale_y(y)):.1f}" '
                f'r="1.6" style="fill:{ink}" fill-opacity=".4"/>'
            )
    if series.low is not None and series.high is not None and len(series.x):
        x, low, high = _subsample(series.x, series.low, series.high)
        edge = frame.format_points(np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]]))
        yield f'<polygon points="{edge}" style="fill:{ink}" fill-opacity=".2"/>'
    if len(series.x):
        x, y = _subsample(series.x, series.y)
        dash = ' stroke-dasharray="7 4"' if number >= len(COLOURS) else ""
        yield (
            f'<polyline points="{frame.format_points(x, y)}" fill="none" style="stroke:{ink}" '
            f'stroke-width="2.5" stroke-linejoin="round" stroke-linecap="round"{dash}/>'
        )


def _subsample(*columns: Float64) -> list[Float64]:
    """The same points, or as many of them as can be seen."""
    picks = np.unique(np.linspace(0, len(columns[0]) - 1, _MOST_POINTS).astype(int))
    return [column[picks] if len(column) > _MOST_POINTS else column for column in columns]


def _format_description(chart: Chart) -> str:
    names = ", ".join(series.label for series in chart.series)
    return f"{chart.title}: {chart.y_label} over {chart.x_label}; {names}"
