"""A chart as an image file, by matplotlib, which is an extra. Must not know: runs."""

from __future__ import annotations

import importlib.util
import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflame.errors import ConfigError, RlflameError
from rlflame.plot import COLOURS, Bars, Chart, Series, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_WIDTH_LETTERS, _MOST_ROWS = 90, 5
_DPI = 120  # 10 inches are 1200 pixels
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, and set in the reader's font
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
}
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))


class PlotUnavailable(RlflameError):
    """matplotlib is not installed."""


def check_available() -> None:
    try:
        missing = importlib.util.find_spec("matplotlib") is None
    except ValueError:  # somebody has put something else in its place
        missing = True
    if missing:
        raise PlotUnavailable(
            "matplotlib is not installed, so there will be no plot.", "pip install 'rlflame[plot]'"
        )


def check_suffix(out: Path) -> None:
    if out.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"A picture is drawn as {', '.join(s[1:] for s in SUFFIXES)}, not {out.name!r}.",
            f"-o {out.with_suffix('.png')}",
        )


def image(drawing: Chart | Bars, out: Path) -> bytes:
    """What the file is to hold, of the kind that its name ends with."""
    check_available()
    # It would log where it keeps its caches.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        data = io.BytesIO()
        drawn(drawing).savefig(data, dpi=_DPI, format=out.suffix[1:].lower())
    return data.getvalue()


def drawn(drawing: Chart | Bars) -> Figure:
    # A Figure by itself needs no display and no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    if isinstance(drawing, Bars):
        _draw_bars(axes, drawing)
    else:
        _draw_lines(axes, drawing)
    axes.set_xlabel(drawing.x_label)
    axes.set_ylabel(drawing.y_label)
    above = _draw_legend(axes)
    axes.set_title(drawing.title, loc="left", pad=14 + 18.5 * above)
    if drawing.note:
        figure.supxlabel(drawing.note, fontsize=9, color="#666666", x=0.99, ha="right")
    return figure


def _draw_legend(axes: Axes) -> int:
    """Above the plot, in so many rows; beside it where there are too many; none for one line."""
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) < 2:
        return 0
    columns = max(1, min(4, len(labels), _WIDTH_LETTERS // (max(map(len, labels)) + 8)))
    rows = -(-len(labels) // columns)
    if rows > _MOST_ROWS:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=10)
        return 0
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns)
    return rows


def _draw_lines(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter

    alone = len(chart.series) == 1
    for number, series in enumerate(chart.series):
        _draw_series(axes, series, number, alone)
    axes.grid(visible=True)
    axes.margins(x=0.01)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _draw_series(axes: Axes, series: Series, number: int, alone: bool) -> None:
    colour = COLOURS[number % len(COLOURS)]
    label, line_colour = series.label, colour
    if series.dots is not None:
        axes.plot(
            *series.dots,
            linestyle="none",
            marker=".",
            markersize=5 if alone else 4,
            markeredgewidth=0,
            color=colour,
            alpha=0.6 if alone else 0.3,
            label="Episode" if alone else None,
        )
        if alone:
            label, line_colour = f"Mean of the last {series.average_of}", "red"
    if series.low is not None and series.high is not None:
        axes.fill_between(
            series.x, series.low, series.high, color=line_colour, alpha=0.18, linewidth=0
        )
    if len(series.x):
        dashes = _DASHES[number // len(COLOURS) % len(_DASHES)]
        few = len(series.x) <= 12
        axes.plot(
            series.x,
            series.y,
            color=line_colour,
            linestyle=dashes,
            marker="o" if few else None,
            markersize=4.5,
            label=label,
        )


def _draw_bars(axes: Axes, bars: Bars) -> None:
    places = np.arange(len(bars.groups))
    width = 0.8 / len(bars.names)
    for number, name in enumerate(bars.names):
        at = places + (number - (len(bars.names) - 1) / 2) * width
        heights = bars.heights[number]
        drawn = axes.bar(
            at,
            np.nan_to_num(heights),
            width * 0.94,
            color=COLOURS[number % len(COLOURS)],
            label=name,
        )
        labels = ["" if np.isnan(height) else f"{height:.2f}×" for height in heights]
        clear = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # of the ideal's dashes
        axes.bar_label(drawn, labels, padding=4, fontsize=10, bbox=clear, zorder=4)
    for place, ideal in zip(places, bars.ideal, strict=True):
        axes.hlines(
            ideal,
            place - 0.45,
            place + 0.45,
            color="#444444",
            linestyles="--",
            linewidth=1.4,
            label="Ideal" if place == 0 else "",
        )
    axes.set_xticks(places, bars.groups)
    axes.margins(y=0.1)
    axes.grid(visible=True, axis="y")
