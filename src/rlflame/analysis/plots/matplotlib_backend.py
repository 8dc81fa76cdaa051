"""Draws charts as image files and inline SVG with matplotlib, which is optional."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflame.analysis.plots.chart import (
    COLOURS,
    Bars,
    Chart,
    Plot,
    Series,
    collect_panels,
    format_compact,
)
from rlflame.errors import ConfigError, RlflameError, check_extra, format_shell, replace_suffix
from rlflame.terminal_text import escape_controls

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_NOTE_LETTERS = 150
#: If a chart has more lines than the first limit, its panel has the full width and the legend is
#: beside the plot. A panel also has the full width if a label has more letters than the second
#: limit.
_MOST_LEGEND_LINES, _MOST_PANEL_LETTERS = 8, 36
#: The height of a row of panels.
_PANEL_INCHES = 4.4
_DPI = 120  # 10 inches are 1200 pixels
_STYLE: Any = {
    "svg.hashsalt": "rlflame",  # equal charts give identical files
    "svg.fonttype": "none",  # text stays searchable and uses the reader's font
    "text.parse_math": False,  # a name may contain $
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
#: When the colours run out, they repeat with the next dash pattern or hatch.
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
_HATCHES = ("", "//", "xx")
#: With more bars than the first limit, the height labels are vertical; beyond the second, they are
#: omitted.
_MOST_LEVEL_HEIGHTS, _MOST_HEIGHTS = 18, 36
#: The background of a height label, which keeps it readable over the dashed ideal line.
_GROUND: Any = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5}


class PlotUnavailableError(RlflameError):
    """Raised when matplotlib is not installed."""


def check_available() -> None:
    check_extra("matplotlib", "there will be no plot", "plot", PlotUnavailableError)


def check_suffix(out: Path) -> None:
    if out.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"An image is written as a .png, .svg or .pdf file, not as {str(out)!r}.",
            format_shell("-o", replace_suffix(out, ".png", "plot")),
        )


def render_image(plot: Plot, out: Path) -> bytes:
    """Return the bytes of an image file, in the format given by the suffix of `out`."""
    kind, data = out.suffix[1:].lower(), io.BytesIO()
    # An SVG would contain its creation date; a PNG has no such metadata.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else None
    with _use_style():
        make_figure(plot).savefig(data, dpi=_DPI, format=kind, metadata=metadata)
    return data.getvalue()


def render_svg(chart: Chart) -> str:
    """Return an <svg> element that scales to the width of its container."""
    text = render_image(chart, Path("chart.svg")).decode()
    text = text[text.index("<svg") :]
    return re.sub(r'<svg .*?(viewBox="[^"]*").*?>', r'<svg \1 role="img">', text, count=1)


@contextlib.contextmanager
def _use_style() -> Iterator[None]:
    check_available()
    # matplotlib logs the location of its caches.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def make_figure(plot: Plot) -> Figure:
    """Draw a plot as a figure; several panels are arranged in rows."""
    # A Figure made without pyplot needs no display and no global state.
    from matplotlib.figure import Figure

    panels = collect_panels(plot)
    across = 1 if len(panels.parts) == 1 or any(map(_is_wide, panels.parts)) else 2
    rows = -(-len(panels.parts) // across)
    height = 6.0 if panels is not plot else _PANEL_INCHES * rows
    figure = Figure(figsize=(10.0, height), layout="constrained")
    for place, part in enumerate(panels.parts):
        axes = figure.add_subplot(rows, across, place + 1)
        if isinstance(part, Bars):
            _draw_bars(axes, part, across)
        else:
            is_single = part is plot and len(part.series) == 1
            _draw_lines(axes, part, panels.number_lines()[place], is_single=is_single)
        axes.set(xlabel=part.x_label, ylabel=part.y_label)
        axes.set_title(part.title, loc="left")
        # A panel has a legend even for one line.
        labels = axes.get_legend_handles_labels()[1]
        if len(labels) > _MOST_LEGEND_LINES:
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=10)
        elif len(labels) > 1 or panels is plot:
            # The ideal line of bars ends at the upper right.
            axes.legend(loc="upper left" if isinstance(part, Bars) else "best", fontsize=10)
    if panels.title:
        figure.suptitle(panels.title, x=0.01, ha="left", fontsize=15, fontweight="bold")
    if all_bars := [part for part in panels.parts if isinstance(part, Bars)]:
        # Equal scales make the panels comparable.
        highest = max(np.nanmax([*bars.heights.flat, *bars.ideal]) for bars in all_bars)
        for axes in figure.axes:
            axes.set_ylim(0.0, 1.15 * highest)
    if panels.notes:
        note = textwrap.fill(" ".join(panels.notes), _NOTE_LETTERS)
        figure.supxlabel(note, fontsize=9, color="#666666", x=0.99, ha="right")
    _escape_texts(figure)
    return figure


def _is_wide(part: Chart | Bars) -> bool:
    """Return whether a panel needs the full width of the image."""
    labels = [line.label for line in part.series] if isinstance(part, Chart) else part.names
    return len(labels) > _MOST_LEGEND_LINES or max(map(len, labels)) > _MOST_PANEL_LETTERS


def _escape_texts(figure: Figure) -> None:
    """Escape control characters, which fonts lack and XML does not allow."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        words = text.get_text()
        if words != (printable := escape_controls(words)):
            text.set_text(printable)


def _escape_label(label: str) -> str:
    """Put a space before a leading underscore, as matplotlib omits such labels."""
    return f" {label}" if label.startswith("_") else label


def _draw_lines(axes: Axes, chart: Chart, numbers: Sequence[int], *, is_single: bool) -> None:
    """Draw the lines of a chart; their `numbers` determine colours and dash patterns."""
    from matplotlib.ticker import FuncFormatter

    for number, series in zip(numbers, chart.series, strict=True):
        _draw_series(axes, series, number, is_single)
    axes.grid(visible=True)
    axes.margins(x=0.01)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_compact(value)))


def _draw_series(axes: Axes, series: Series, number: int, is_single: bool) -> None:
    colour = COLOURS[number % len(COLOURS)]
    label, line_colour = _escape_label(series.label), colour
    if series.dots is not None:
        size, opacity = (5, 0.6) if is_single else (4, 0.3)
        # If there are too few dots for a line, the dots have the label.
        name = "Episode" if is_single else None if len(series.x) else label
        axes.plot(
            *series.dots, linestyle="none", marker=".", markersize=size, markeredgewidth=0,
            color=colour, alpha=opacity, label=name,
        )  # fmt: skip
        if is_single:
            label, line_colour = f"Mean over {series.average_of} episodes", "red"
    if series.low is not None and series.high is not None:
        axes.fill_between(
            series.x, series.low, series.high, color=line_colour, alpha=0.18, linewidth=0
        )
    if len(series.x):
        dashes = _DASHES[number // len(COLOURS) % len(_DASHES)]
        marker = "o" if len(series.x) <= 12 else None
        axes.plot(
            series.x, series.y, color=line_colour, linestyle=dashes, marker=marker, markersize=4.5,
            label=label,
        )  # fmt: skip


def _draw_bars(axes: Axes, bars: Bars, across: int) -> None:
    """Draw the bars and the ideal height of each group; label the bars if they fit."""
    places = np.arange(len(bars.groups))
    width, total = 0.8 / len(bars.names), across * bars.heights.size
    for number, name in enumerate(bars.names):
        container = axes.bar(
            places + (number - (len(bars.names) - 1) / 2) * width,
            np.nan_to_num(bars.heights[number]), width * 0.94, color=COLOURS[number % len(COLOURS)],
            hatch=_HATCHES[number // len(COLOURS) % len(_HATCHES)], edgecolor="white", linewidth=0,
            label=_escape_label(name),
        )  # fmt: skip
        if total <= _MOST_HEIGHTS:
            labels = [
                "" if np.isnan(height) else f"{height:.2f}×" for height in bars.heights[number]
            ]
            angle = 90 if total > _MOST_LEVEL_HEIGHTS else 0
            axes.bar_label(container, labels, padding=4, fontsize=8.5, rotation=angle, bbox=_GROUND)
    axes.hlines(
        bars.ideal, places - 0.45, places + 0.45, color="#444444", linestyles="--", linewidth=1.4,
        label="Ideal",
    )  # fmt: skip
    axes.set_xticks(places, bars.groups)
    axes.grid(visible=True, axis="y")


def write_image(folder: Path, name: str, metric: str | None = None) -> Path:
    """Plot the runs in `folder` and write the image there; this needs matplotlib."""
    from rlflame.analysis import curves
    from rlflame.storage import run_reader, safetensors_file

    check_available()
    out = folder / name
    runs, _ = run_reader.read_runs([folder])
    image = render_image(curves.make_figure(runs, metric=metric), out)
    safetensors_file.write_atomically(out, image)
    return out
