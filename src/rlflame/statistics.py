"""Interquartile means, bootstrap intervals and comparisons for a few seeds.

Resampling is stratified: seeds are drawn within each stratum (the runs of one environment), never
across strata (Agarwal et al., 2021). With few seeds, all resamples are enumerated. With more seeds,
resamples are drawn from fixed random streams, so that the same values give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlflame.rollout.seeding import Role, make_stream
from rlflame.rollout.task import Array, Float64

RESAMPLES = 10_000
#: The number of resamples for a curve, which needs an interval at every point.
CURVE_RESAMPLES = 2_000
#: With fewer seeds, a bootstrap cannot estimate the variation between seeds.
FEWEST_SEEDS = 3
_NUMBERS_AT_ONCE = 2_000_000

Strata = Sequence[Float64]


@np.errstate(over="ignore", invalid="ignore")  # a sum that overflows is shown as infinity
def compute_interquartile_means(values: Float64) -> Float64:
    """Return the mean of the middle half along the last axis.

    A value at an edge of that half may get a fractional weight.
    """
    sorted_values = np.sort(values, axis=-1)
    n = sorted_values.shape[-1]
    # Sample i covers [i, i + 1] of a line of length n; the middle half is [n/4, 3n/4].
    edges = np.arange(n)
    share = np.clip(np.minimum(edges + 1, 0.75 * n) - np.maximum(edges, 0.25 * n), 0.0, 1.0)
    means: Float64 = (sorted_values * share).sum(axis=-1) / share.sum()
    return means


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MeanStd:
    """The mean and the sample standard deviation over seeds.

    For a single seed, the standard deviation is 0.
    """

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class SeedSummary(MeanStd):
    """Summary statistics of one value per seed."""

    seeds: int
    iqm: Interval
    worst: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of two samples, and the verdicts that it supports."""

    #: Number of values in each sample.
    seeds: tuple[int, int]
    #: Difference between the first sample and the second, with its 95% interval.
    difference: Interval
    #: The difference with its 90% interval, for two one-sided tests at 5%.
    equivalence: Interval
    #: Largest difference that still counts as equivalent.
    margin: float

    @property
    def has_enough_seeds(self) -> bool:
        return min(self.seeds) >= FEWEST_SEEDS

    @property
    def better(self) -> bool:
        return self.has_enough_seeds and self.difference.low > 0.0

    @property
    def not_worse(self) -> bool:
        return self.has_enough_seeds and self.equivalence.low > -self.margin

    @property
    def equivalent(self) -> bool:
        return self.not_worse and self.equivalence.high < self.margin

    @property
    def verdicts(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in ("better", "not_worse", "equivalent")}


@dataclass(frozen=True, slots=True)
class SeedComparison(Comparison):
    """A comparison of two samples with one value per seed."""

    #: Probability that a seed of the first sample beats one of the second; a tie counts as half.
    probability_of_improvement: Interval


@np.errstate(over="ignore", invalid="ignore")
def summarise(values: Float64) -> SeedSummary:
    """Return summary statistics of one value per seed."""
    mean_std, iqm = compute_mean_std(values), compute_iqm_interval([values])
    return SeedSummary(mean_std.mean, mean_std.std, len(values), iqm, float(values.min()))


def compute_mean_std(values: Float64) -> MeanStd:
    return MeanStd(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0)


def find_best_mean(curves: Sequence[tuple[Float64, Float64]]) -> tuple[int, MeanStd] | None:
    """Return the step at which the mean of all curves is highest, and that mean.

    Each curve is a pair (steps, values). Only steps that all curves cover are considered. If there
    are none, return None. Papers often report this mean as the best result. It is biased upwards,
    and the bias grows with the number of points.
    """
    if not curves or not all(len(steps) for steps, _ in curves):
        return None
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    points = np.unique(np.concatenate([x for x, _ in curves]))
    points = points[(points >= first) & (points <= last)]
    if not len(points):
        return None
    # Curves measured at the same steps keep their exact values.
    values = np.stack([np.interp(points, x, y) for x, y in curves])
    at = int(values.mean(axis=0).argmax())
    return int(points[at]), compute_mean_std(values[:, at])


def compute_tail_mean(values: Float64, share: float = 0.05) -> float:
    """Return the mean of the last `share` of a curve, but of at least one point."""
    return float(values[-max(1, math.ceil(share * len(values))) :].mean())


def compute_iqm_interval(strata: Strata, level: float = 0.95) -> Interval:
    """Return the interquartile mean over all strata together, with its interval."""
    value = float(compute_interquartile_means(np.concatenate(strata)))
    means = _resample(
        strata, lambda *parts: compute_interquartile_means(np.concatenate(parts, axis=-1))
    )
    return means.make_interval(value, level)


def compute_iqm_band(curves: Float64) -> tuple[Float64, Float64, Float64]:
    """Return the IQM over seeds at each point, and the bounds of its 95% interval.

    The shape of `curves` is [seeds, points].
    """
    middle = compute_interquartile_means(curves.T)
    seeds, points = curves.shape
    if seeds < 2:
        return middle, middle, middle
    is_exhaustive = seeds**seeds <= RESAMPLES
    if is_exhaustive:
        picks = _list_picks(seeds)
    else:
        picks = make_stream(0, Role.BOOTSTRAP, seeds).integers(0, seeds, (CURVE_RESAMPLES, seeds))
    low, high = np.empty(points), np.empty(points)
    chunk_size = max(1, _NUMBERS_AT_ONCE // picks.size)
    for start in range(0, points, chunk_size):
        points_slice = slice(start, start + chunk_size)
        # [points, resamples, seeds]: every point uses the same resamples of the seeds.
        means = compute_interquartile_means(curves[:, points_slice].T[:, picks])
        low[points_slice], high[points_slice] = _ResampledStatistic(
            means, is_exhaustive
        ).compute_ends(0.95)
    return middle, low, high


def compare(values: Float64, baseline: Float64, margin_share: float = 0.1) -> SeedComparison:
    """Compare values with a baseline; the margin is a share of the baseline's IQM."""
    base = float(compute_interquartile_means(baseline))
    value = float(compute_interquartile_means(values)) - base
    differences = _resample(
        [values, baseline],
        lambda a, b: compute_interquartile_means(a) - compute_interquartile_means(b),
    )
    return SeedComparison(
        seeds=(len(values), len(baseline)),
        difference=differences.make_interval(value, 0.95),
        equivalence=differences.make_interval(value, 0.90),
        probability_of_improvement=_resample(
            [values, baseline], _compute_improvement_probability
        ).make_interval(float(_compute_improvement_probability(values, baseline)), 0.95),
        margin=margin_share * abs(base),
    )


@np.errstate(over="ignore", divide="ignore", invalid="ignore")  # a baseline near zero
def compare_medians(
    values: Sequence[float] | Float64, baseline: Sequence[float] | Float64, level: float = 0.95
) -> Interval:
    """Return the change in the median as a percentage of the baseline median.

    The bounds are those of its bootstrap interval.
    """
    values, baseline = (np.asarray(side, np.float64) for side in (values, baseline))

    def compute_change_percent(a: Array, b: Array) -> Float64:
        base = np.median(b, axis=-1)
        change: Float64 = 100.0 * (np.median(a, axis=-1) - base) / np.abs(base)
        return change

    value = float(compute_change_percent(values, baseline))
    return _resample([values, baseline], compute_change_percent).make_interval(value, level)


def compute_median_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the median of repetitions with its bootstrap interval."""
    medians = _resample([np.array(values, np.float64)], lambda part: np.median(part, axis=-1))
    return medians.make_interval(float(np.median(values)), level)


def compute_mean_interval(values: Float64, level: float = 0.95) -> tuple[float, float]:
    """Return the bounds of the mean's bootstrap interval, from random resamples."""
    if len(values) < 2:
        return float(values.mean()), float(values.mean())
    stream = make_stream(0, Role.BOOTSTRAP, len(values))
    means = _draw_resamples([values], lambda part: part.mean(axis=-1), [stream])
    interval = means.make_interval(float(values.mean()), level)
    return interval.low, interval.high


def _compute_improvement_probability(a: Float64, b: Float64) -> Float64:
    """Return P(value of a > value of b) along the last axis; a tie counts as half."""
    difference = a[..., :, None] - b[..., None, :]
    wins: Float64 = (np.sign(difference) / 2.0 + 0.5).mean(axis=(-1, -2))
    return wins


@dataclass(frozen=True, slots=True)
class _ResampledStatistic:
    """A statistic of all resamples, or of a random sample of them.

    The resamples are along the last axis of `values`.
    """

    values: Float64
    is_exhaustive: bool

    def compute_ends(self, level: float) -> tuple[Float64, Float64]:
        tail = (1.0 - level) / 2.0
        # If all resamples are enumerated, a quantile must be one of their values.
        method: Literal["inverted_cdf", "linear"] = (
            "inverted_cdf" if self.is_exhaustive else "linear"
        )
        low, high = np.quantile(self.values, (tail, 1.0 - tail), axis=-1, method=method)
        return low, high

    def make_interval(self, value: float, level: float) -> Interval:
        low, high = self.compute_ends(level)
        return Interval(value, float(low), float(high))


def _resample(strata: Strata, statistic: Callable[..., Float64]) -> _ResampledStatistic:
    """Return the statistic of all resamples, or of `RESAMPLES` random ones."""
    # Resamples are random if there are more than `RESAMPLES`. Each stratum has its own stream.
    combinations = [len(part) ** len(part) for part in strata]
    if math.prod(combinations) <= RESAMPLES:
        places = np.unravel_index(np.arange(math.prod(combinations)), combinations)
        picks = [_list_picks(len(part))[at] for part, at in zip(strata, places, strict=True)]
        samples = [part[rows] for part, rows in zip(strata, picks, strict=True)]
        return _ResampledStatistic(statistic(*samples), is_exhaustive=True)
    streams = [make_stream(0, Role.BOOTSTRAP, i, len(part)) for i, part in enumerate(strata)]
    return _draw_resamples(strata, statistic, streams)


def _draw_resamples(
    strata: Strata, statistic: Callable[..., Float64], streams: Sequence[np.random.Generator]
) -> _ResampledStatistic:
    results = np.empty(RESAMPLES, np.float64)
    chunk_size = max(1, _NUMBERS_AT_ONCE // int(np.prod([len(part) for part in strata])))
    for start in range(0, RESAMPLES, chunk_size):
        stop = min(RESAMPLES, start + chunk_size)
        samples = [
            part[generator.integers(0, len(part), (stop - start, len(part)))]
            for part, generator in zip(strata, streams, strict=True)
        ]
        results[start:stop] = statistic(*samples)
    return _ResampledStatistic(results, is_exhaustive=False)


def _list_picks(seeds: int) -> Array:
    """Return all ways to draw `seeds` seeds with replacement, one per row."""
    return np.indices((seeds,) * seeds).reshape(seeds, -1).T
