"""Backend-independent descriptions of charts.

plots/matplotlib_backend.py draws them as images, plots/terminal_backend.py as text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlflame.rollout.task import Float64

#: The colour-blind-safe palette by Okabe and Ito, without yellow, which is too pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")


@dataclass(frozen=True)
class Series:
    """A line, the band around it, and the dots that it averages; each may be absent."""

    label: str
    x: Float64
    y: Float64
    low: Float64 | None = None
    high: Float64 | None = None
    dots: tuple[Float64, Float64] | None = None
    #: The number of dots that each point of the line averages.
    average_of: int = 0

    def collect_x(self) -> Float64:
        return np.concatenate([self.x, *(self.dots[:1] if self.dots else ())])

    def collect_y(self) -> Float64:
        parts = [self.y, self.low, self.high, self.dots[1] if self.dots else None]
        return np.concatenate([part for part in parts if part is not None])

    def scale_x(self, divisor: float) -> Series:
        """Return a copy with all x values divided by `divisor`."""
        dots = (self.dots[0] / divisor, self.dots[1]) if self.dots else None
        return replace(self, x=self.x / divisor, dots=dots)


@dataclass(frozen=True)
class Chart:
    """A chart of lines that share the same axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    #: Sentences that explain lines and bands and report missing data.
    notes: tuple[str, ...] = ()

    def compute_bounds(self) -> tuple[float, float, float, float]:
        """Return (x_min, x_max, y_min, y_max); a minimum never equals its maximum."""
        x = np.concatenate([line.collect_x() for line in self.series])
        y = np.concatenate([line.collect_y() for line in self.series])
        return *_separate_bounds(x), *_separate_bounds(y)


@dataclass(frozen=True)
class Bars:
    """A chart of grouped bars. `heights[name, group]` is NaN if it was not measured."""

    title: str
    x_label: str
    y_label: str
    groups: tuple[str, ...]
    names: tuple[str, ...]
    heights: Float64
    ideal: Float64
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Panels:
    """One or more charts in one image, each with its own axes. `notes` apply to all."""

    parts: tuple[Chart | Bars, ...]
    notes: tuple[str, ...] = ()
    title: str = ""

    def number_lines(self) -> list[list[int]]:
        """Number the lines of each chart; equal labels have equal numbers in all panels.

        If a label occurs twice in a panel, its lines have different numbers.
        """
        line_numbers: dict[tuple[str, int], int] = {}
        part_numbers = []
        for part in self.parts:
            labels = [line.label for line in part.series] if isinstance(part, Chart) else []
            keys = [(label, labels[:i].count(label)) for i, label in enumerate(labels)]
            part_numbers.append([line_numbers.setdefault(key, len(line_numbers)) for key in keys])
        return part_numbers


#: Everything that the backends can draw.
Plot = Chart | Panels | Bars


def collect_panels(plot: Plot) -> Panels:
    """Return a plot as panels; a single chart becomes a single panel."""
    return plot if isinstance(plot, Panels) else Panels((plot,), plot.notes)


def _separate_bounds(values: Float64) -> tuple[float, float]:
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if not np.isfinite([low, high]).all():
        return 0.0, 1.0
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low, high


def make_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` numbers in [low, high], spaced by 1, 2 or 5 times 10^k."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(n * power for n in (1.0, 2.0, 5.0, 10.0) if n * power >= rough * 0.999)
    first, last = int(np.ceil(low / step - 1e-9)), int(np.floor(high / step + 1e-9))
    return [float(n * step) for n in range(first, last + 1)]


def format_compact(value: float) -> str:
    """Format a number compactly, for example as `1.5M`, `20k` or `-0.25`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
