"""The action values of two critics, compared with float64 sums."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from rlflame.config.algorithms import SacSettings
from rlflame.learning.sac.networks import ClippedDoubleQ, TruncatedQuantiles, make_critic_loss


def values(outputs: int, rows: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return 3.0 * generator.standard_normal((2, outputs, rows), np.float32)


def test_the_lowest_of_both_critics_are_kept_in_order() -> None:
    both = values(6, 5)
    kept = TruncatedQuantiles(6, 2).compute_target_values(both)
    np.testing.assert_array_equal(kept, np.sort(np.concatenate(both), axis=0)[:8])
    assert not np.shares_memory(kept, both)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_left_out(bad: float) -> None:
    both = values(6, 5)
    both[1, 2, 3] = bad
    kept = TruncatedQuantiles(6, 2).compute_target_values(both)
    assert not np.isfinite(kept[:, 3]).all()
    assert np.isfinite(kept[:, [0, 1, 2, 4]]).all()


def test_with_none_dropped_and_one_each_both_count() -> None:
    both = values(1, 5)
    assert TruncatedQuantiles(1, 0).compute_target_values(both).shape == (2, 5)
    np.testing.assert_array_equal(ClippedDoubleQ().compute_target_values(both), np.minimum(*both))
    assert isinstance(make_critic_loss(1, 0), ClippedDoubleQ)
    assert isinstance(make_critic_loss(2, 0), TruncatedQuantiles)


def test_the_slope_is_that_of_the_huber_loss_of_quantiles() -> None:
    """Each term: |fraction - (target is lower)| times the slope of the Huber loss."""
    (have, _), (wanted, _) = values(5, 4), values(7, 4, seed=1)
    slope, off = TruncatedQuantiles(5, 0).compute_error(have, wanted, count=10)
    expected = np.zeros((5, 4))
    for place in range(5):
        fraction = (place + 0.5) / 5
        for row in range(4):
            for other in range(7):
                apart = float(wanted[other, row]) - float(have[place, row])
                weight = abs(fraction - (apart < 0.0))
                expected[place, row] -= weight * np.clip(apart, -1.0, 1.0) / (5 * 7 * 10)
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-8)
    means = have.mean(axis=0, dtype=np.float64) - wanted.mean(axis=0, dtype=np.float64)
    assert off == pytest.approx(np.square(means).sum(), rel=1e-5)


def test_who_follows_the_slope_comes_to_the_quantiles() -> None:
    """In a wide distribution, the quadratic part of the Huber loss has little effect."""
    returns = 1000.0 * np.random.default_rng(3).standard_normal((4_000, 1)).astype(np.float32)
    worth, found = TruncatedQuantiles(5, 0), np.zeros((5, 1), np.float32)
    for rate in (2_000.0, 200.0, 20.0):
        for _ in range(400):
            found -= rate * 5 * worth.compute_error(found, returns, count=1)[0]
    expected = np.quantile(returns, [0.1, 0.3, 0.5, 0.7, 0.9])
    np.testing.assert_allclose(found[:, 0], expected, atol=15.0)


def test_an_action_is_worth_the_mean_of_all() -> None:
    both = values(4, 3)
    slopes, worth = TruncatedQuantiles(4, 1).compute_slopes(both, count=6)
    assert worth == pytest.approx(np.mean(both, axis=(0, 1), dtype=np.float64).sum(), rel=1e-6)
    for slope in slopes:
        np.testing.assert_allclose(slope, -1.0 / (8 * 6), rtol=1e-6)


def test_one_quantile_at_least_is_kept() -> None:
    assert SacSettings(quantiles=5, dropped_quantiles=4).quantiles == 5
    with pytest.raises(ValidationError, match=r"less than quantiles \(5\)"):
        SacSettings(quantiles=5, dropped_quantiles=5)
    with pytest.raises(ValidationError, match=r"less than quantiles \(1\)"):
        SacSettings(dropped_quantiles=1)
