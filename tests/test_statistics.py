"""Statistics compared with arithmetic by hand, all possible resamples, and scipy."""

from __future__ import annotations

import itertools
import tracemalloc
from fractions import Fraction
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from rlflame import statistics


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def test_interquartile_mean_by_hand():
    # The middle half of eight samples is the third to the sixth; of up to four, the middle two.
    assert (
        statistics.compute_interquartile_means(array(8, 1, 2, 3, 100, 5, 6, -50))
        == (2 + 3 + 5 + 6) / 4
    )
    assert statistics.compute_interquartile_means(array(4, 1, 3, 2)) == 2.5
    # For three samples, a quarter of a sample on each side counts with all of the middle one.
    expected = (Fraction(1, 4) * 0 + 1 * 4 + Fraction(1, 4) * 12) / Fraction(3, 2)
    assert statistics.compute_interquartile_means(array(0, 4, 12)) == pytest.approx(float(expected))


def test_interquartile_mean_against_scipy():
    values = np.linspace(-3.0, 9.0, 40).reshape(2, 20) ** 3
    assert statistics.compute_interquartile_means(values) == pytest.approx(
        [stats.trim_mean(row, 0.25) for row in values]
    )


def every_resample(values: np.ndarray) -> np.ndarray:
    return np.array(list(itertools.product(values, repeat=len(values))))


def test_the_interval_is_that_of_all_resamples():
    values = array(1.0, 2.0, 4.0, 8.0, 16.0)
    found = statistics.compute_iqm_interval([values])
    exact = np.sort([statistics.compute_interquartile_means(row) for row in every_resample(values)])
    assert found.value == statistics.compute_interquartile_means(values)
    # The 79th of 3,125 equally likely values is the first that is not below a fortieth of all
    # values.
    assert (found.low, found.high) == pytest.approx((exact[78], exact[3046]))
    band = statistics.compute_iqm_band(values[:, None])
    assert [end[0] for end in band] == pytest.approx([found.value, found.low, found.high])


def test_the_interval_of_many_is_that_of_as_many_resamples_as_are_enough():
    values = array(1.0, 2.0, 4.0, 8.0, 16.0, 40.0)
    found = statistics.compute_iqm_interval([values])
    exact = np.sort(statistics.compute_interquartile_means(every_resample(values)))
    for end, tail in ((found.low, 0.025), (found.high, 0.975)):
        share = np.searchsorted(exact, [end - 1e-9, end + 1e-9]) / len(exact)
        assert share[0] - 0.01 <= tail <= share[1] + 0.01


def test_the_difference_is_that_of_all_pairs_of_resamples():
    a, b = array(1.0, 3.0, 9.0, 10.0), array(0.0, 2.0, 5.0)
    found = statistics.compare(a, b)
    ours = [statistics.compute_interquartile_means(row) for row in every_resample(a)]
    theirs = [statistics.compute_interquartile_means(row) for row in every_resample(b)]
    exact = np.sort(np.subtract.outer(ours, theirs).ravel())
    for interval, tail in ((found.difference, 0.025), (found.equivalence, 0.05)):
        for end, share in ((interval.low, tail), (interval.high, 1.0 - tail)):
            seen = np.searchsorted(exact, [end - 1e-9, end + 1e-9]) / len(exact)
            assert seen[0] - 0.012 <= share <= seen[1] + 0.012


def test_the_two_sides_are_resampled_apart():
    # If both sides were resampled together, equal seeds would never differ.
    same = array(1.0, 50.0, 100.0, 150.0)
    found = statistics.compare(same, same)
    assert found.difference.value == 0.0
    assert found.difference.low < -40.0
    assert found.difference.high > 40.0
    assert not found.equivalent


def test_strata_are_never_mixed():
    # Resampling across strata could draw the low stratum alone, which would lower the mean.
    found = statistics.compute_iqm_interval([array(0.0, 0.0), array(10.0, 10.0)])
    assert (found.low, found.value, found.high) == (5.0, 5.0, 5.0)


def test_probability_of_improvement_counts_pairs_and_halves_ties():
    a, b = array(1.0, 2.0, 3.0), array(2.0, 0.0)
    # 1>0; 2=2 and 2>0; 3>2 and 3>0: four wins and one tie in six pairs.
    assert statistics.compare(a, b).probability_of_improvement.value == 4.5 / 6
    u = stats.mannwhitneyu(a, b).statistic
    assert statistics.compare(a, b).probability_of_improvement.value == u / 6


def test_a_band_is_the_interval_of_each_point():
    curves = np.array([[0.0, 1.0], [0.0, 2.0], [0.0, 4.0], [0.0, 40.0]])
    middle, low, high = statistics.compute_iqm_band(curves)
    assert middle.tolist() == [0.0, 3.0]
    assert (low[0], high[0]) == (0.0, 0.0)
    exact = [statistics.compute_interquartile_means(row) for row in every_resample(curves[:, 1])]
    assert low[1] == pytest.approx(np.quantile(exact, 0.025), abs=0.3)
    assert high[1] == pytest.approx(np.quantile(exact, 0.975), rel=0.15)
    alone = statistics.compute_iqm_band(curves[3:])
    assert [line.tolist() for line in alone] == [[0.0, 40.0]] * 3


@pytest.mark.parametrize(
    ("ours", "better", "not_worse", "equivalent"),
    [
        ([120, 121, 122, 123, 124], True, True, False),
        ([101, 102, 99, 100, 98], False, True, True),
        ([80, 81, 79, 80, 82], False, False, False),
        ([60, 140, 100, 20, 180], False, False, False),  # the same mean, but much more spread
        ([150, 151], False, False, False),  # two seeds are too few for a claim
    ],
)
def test_verdicts(ours, better, not_worse, equivalent):
    found = statistics.compare(array(*ours), array(100, 101, 99, 100, 100))
    assert (
        found.better,
        found.not_worse,
        found.equivalent,
    ) == (
        better,
        not_worse,
        equivalent,
    )
    assert found.verdicts["equivalent"] == equivalent


def test_the_margin_is_a_share_of_their_size_also_below_zero():
    ours, theirs = array(-209, -210, -211), array(-200, -200, -200)
    assert statistics.compare(ours, theirs).margin == 20.0
    assert statistics.compare(ours, theirs).equivalent
    assert not statistics.compare(ours, theirs, margin_share=0.05).not_worse


def test_medians_in_percent():
    found = statistics.compare_medians(array(11.0, 12.0, 50.0), array(10.0, 9.0, 10.0))
    assert found.value == pytest.approx(20.0)
    assert statistics.compare_medians(array(-5.0), array(-10.0)).value == pytest.approx(50.0)


def test_seeds_in_numbers():
    found = statistics.summarise(array(1.0, 3.0, 5.0))
    assert (found.seeds, found.mean, found.worst) == (3, 3.0, 1.0)
    assert found.std == 2.0  # deviations -2, 0, 2: 8 over n - 1
    one = statistics.summarise(array(7.0))
    assert (one.std, one.iqm.low, one.iqm.high) == (0.0, 7.0, 7.0)


def test_equal_numbers_have_equal_intervals():
    values = array(1.0, 5.0, 2.0, 9.0)
    assert statistics.compute_iqm_interval([values]) == statistics.compute_iqm_interval([values])


def test_bootstrap_intervals_of_few_samples_are_those_of_all_resamples():
    """For small n, the means of all n^n resamples give the exact quantiles."""
    for samples in ([1.0, 5.0], [0.0, 1.0, 10.0], [2.0, 3.0, 5.0, 8.0], [1, 1, 2, 9, 4.0]):
        values = np.array(samples)
        means = sorted(fmean(r) for r in itertools.product(values, repeat=len(values)))
        low, high = statistics.compute_mean_interval(values)
        # Ten thousand resamples approximate the quantile to a few thousandths of the distribution.
        for found, level in ((low, 0.025), (high, 0.975)):
            assert means[int((level - 0.006) * len(means))] - 1e-9 <= found
            assert found <= means[min(len(means) - 1, int((level + 0.006) * len(means)))] + 1e-9


def test_bootstrap_intervals_of_many_samples_are_those_of_the_normal_distribution():
    values = np.random.default_rng(0).exponential(size=4000) * 100
    low, high = statistics.compute_mean_interval(values)
    error = values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)
    assert statistics.compute_mean_interval(values, level=0.5)[0] == pytest.approx(
        values.mean() - 0.674 * error, abs=0.1 * error
    )


def test_bootstrap_intervals_are_always_the_same_and_hold_still_where_nothing_varies():
    values = np.random.default_rng(1).normal(size=20)
    assert statistics.compute_mean_interval(values) == statistics.compute_mean_interval(
        values.copy()
    )
    assert statistics.compute_mean_interval(np.full(7, 3.25)) == (3.25, 3.25)
    assert statistics.compute_mean_interval(np.array([3.25])) == (3.25, 3.25)


def test_the_bootstrap_of_many_episodes_fits_into_memory():
    values = np.arange(5000.0)
    tracemalloc.start()
    try:
        statistics.compute_mean_interval(values)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64_000_000  # all resamples at once would take 800 MB
