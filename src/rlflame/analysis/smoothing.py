"""Curves averaged: over a window of their own values, and over the seeds of one recipe.

Must not know: runs, metrics, how a line is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlflame.analysis.plots.chart import Series
from rlflame.rollout.spec import Float64
from rlflame.statistics import compute_iqm_band

#: Points of the grid on which seeds are taken together.
_POINTS = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's values; with `low` and `high` where each value has an interval of its own."""

    x: Float64
    y: Float64
    low: Float64 | None = None
    high: Float64 | None = None
    #: What the values were averaged from, where that is drawn too.
    dots: tuple[Float64, Float64] | None = None


def smooth_values(values: Float64, window: int) -> Float64:
    """Each value with those before it, up to `window` in all; the first ones with fewer."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    means: Float64 = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def compute_moving_average(values: Float64, window: int) -> Float64:
    """Element i is the mean of `window` values, the last of them values[i + window - 1]."""
    if len(values) < window:
        return np.zeros(0)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    averages: Float64 = (sums[window:] - sums[:-window]) / window
    return averages


def interpolate(at: Float64, x: Float64, y: Float64) -> Float64:
    values: Float64 = np.interp(at, x, y)
    return values


def make_common_grid(xs: Sequence[Float64]) -> Float64:
    """Where all of them have values: their own points if those are few, else evenly spread."""
    first, last = max(x[0] for x in xs), min(x[-1] for x in xs)
    if first > last:
        return np.zeros(0)
    points: Float64 = np.unique(np.concatenate(xs))
    points = points[(points >= first) & (points <= last)]
    if len(points) <= _POINTS:
        return points
    return np.linspace(first, last, _POINTS)


def make_single_series(label: str, curve: Curve, average_of: int = 0) -> Series:
    """A single run as it is."""
    return Series(label, curve.x, curve.y, curve.low, curve.high, curve.dots, average_of)


def make_mean_series(label: str, curves: Sequence[Curve], average_of: int = 0) -> Series | None:
    """Several runs as their interquartile mean and its interval.

    None where they have no stretch of the axis in common.
    """
    xs, dots = [curve.x for curve in curves], _concatenate_dots(curves)
    if not all(map(len, xs)):  # too few values for an average of all
        return Series(label, np.zeros(0), np.zeros(0), dots=dots, average_of=average_of)
    grid = make_common_grid(xs)
    if not len(grid) or (len(grid) == 1 and max(map(len, xs)) > 1):
        return None
    values = np.stack([interpolate(grid, curve.x, curve.y) for curve in curves])
    return Series(label, grid, *compute_iqm_band(values), dots, average_of)


def _concatenate_dots(curves: Sequence[Curve]) -> tuple[Float64, Float64] | None:
    dots = [curve.dots for curve in curves if curve.dots is not None]
    if not dots:
        return None
    return np.concatenate([x for x, _ in dots]), np.concatenate([y for _, y in dots])


def compute_overlap(curves: Sequence[Curve]) -> float:
    """How much of the longest curve all of them have, from 0 to 1."""
    ends = [float(curve.x[-1]) for curve in curves if len(curve.x)]
    return min(ends) / max(ends) if ends and max(ends) > 0.0 else 1.0
