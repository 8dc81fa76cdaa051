"""Running statistics, compared with numpy on all samples and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflame.errors import LearningError
from rlflame.learning.normalization import ObservationNormaliser, RewardScaler, RunningMoments


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    offset=st.sampled_from([0.0, 1e4, -1e6]),
    seed=st.integers(0, 99),
)
def test_merged_parts_are_one_pass_over_all(sizes, offset, seed):
    rng = np.random.default_rng(seed)
    parts = [offset + rng.standard_normal((n, 3)) for n in sizes]
    moments = RunningMoments(3)
    for part in parts:
        moments.merge(part)

    everything = np.concatenate(parts)
    if len(everything):
        np.testing.assert_allclose(moments.mean, everything.mean(axis=0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(moments.compute_variance(), everything.var(axis=0), rtol=1e-7)
    else:
        assert moments.compute_variance().tolist() == [1.0] * 3


def test_a_hundred_thousand_float32_samples_far_from_zero():
    """With sums in float32, the third digit would be wrong."""
    rng = np.random.default_rng(0)
    samples = (1000.0 + 0.01 * rng.standard_normal((100_000, 2))).astype(np.float32)
    moments = RunningMoments(2)
    for part in np.split(samples, [0, 30_000, 30_001]):
        moments.merge(part)

    np.testing.assert_allclose(
        moments.compute_variance(), samples.astype(np.float64).var(axis=0), 1e-8
    )


def test_the_normaliser_standardises_what_is_valid():
    rng = np.random.default_rng(1)
    normaliser = ObservationNormaliser(2)
    seen = []
    for _ in range(3):
        observations = (5.0 + 3.0 * rng.standard_normal((10, 4, 2))).astype(np.float32)
        valid = rng.random((10, 4)) < 0.7
        observations[~valid] = np.nan
        normaliser.merge(observations[valid])
        seen.extend(observations[t, c] for t in range(10) for c in range(4) if valid[t, c])

    arrays = normaliser.make_arrays()
    standard = (np.array(seen, np.float64) - arrays["normaliser.mean"]) * arrays["normaliser.scale"]
    assert {array.dtype.name for array in arrays.values()} == {"float32"}
    np.testing.assert_allclose(standard.mean(axis=0), 0.0, atol=1e-6)
    np.testing.assert_allclose(standard.std(axis=0), 1.0, atol=1e-6)


def test_a_new_normaliser_changes_nothing_and_a_constant_feature_stays_finite():
    normaliser = ObservationNormaliser(2)
    assert normaliser.make_arrays()["normaliser.mean"].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(normaliser.make_arrays()["normaliser.scale"], 1.0, atol=1e-6)

    normaliser.merge(np.full((8, 2), 7.3, np.float32))
    arrays = normaliser.make_arrays()
    assert np.isfinite(arrays["normaliser.scale"]).all()
    np.testing.assert_array_equal(arrays["normaliser.mean"], np.float32(7.3))


def test_rewards_without_a_variance_end_the_run_where_all_would_become_0():
    scaler = RewardScaler(1, 0.99)
    valid = np.ones((1, 1), bool)
    assert scaler.scale(np.full((1, 1), 3.0), ~valid, valid) > 0.0
    with pytest.raises(LearningError, match=r"as large as 1e\+160"):
        scaler.scale(np.full((1, 1), 1e160), ~valid, valid)


def random_rewards(rng, steps, columns):
    return 3.0 + rng.standard_normal((steps, columns)), rng.random((steps, columns)) < 0.1


def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return():
    rng = np.random.default_rng(2)
    scaler = RewardScaler(4, 0.9)
    returns, running = [], [0.0] * 4
    for _ in range(3):
        rewards, ended = random_rewards(rng, 15, 4)
        factor = scaler.scale(rewards, ended, np.ones((15, 4), bool))
        for t in range(15):
            for c in range(4):
                running[c] = running[c] * 0.9 + rewards[t, c]
                returns.append(running[c])
                if ended[t, c]:
                    running[c] = 0.0
        assert factor == pytest.approx(1.0 / np.std(returns), rel=1e-6)


def test_idle_steps_do_not_scale_rewards():
    """Two batches of whole episodes, one with idle steps, give the same scale."""
    rewards = np.array([[1.0, 2.0], [3.0, 0.0], [4.0, 0.0]])
    ended = np.array([[False, True], [False, False], [True, False]])
    valid = np.array([[True, True], [True, False], [True, False]])
    scaler = RewardScaler(2, 0.5)
    factors = [scaler.scale(rewards, ended, valid) for _ in range(2)]

    returns = [1.0, 2.0, 3.5, 5.75]
    assert factors == pytest.approx([1.0 / np.std(returns)] * 2, rel=1e-6)


def test_states_go_on_where_they_stopped():
    rng = np.random.default_rng(3)
    parts = [random_rewards(rng, 5, 2) for _ in range(4)]
    valid = np.ones((5, 2), bool)
    straight, first, second = (RewardScaler(2, 0.99) for _ in range(3))
    expected = [straight.scale(*part, valid) for part in parts]
    for part in parts[:2]:
        first.scale(*part, valid)
    saved = first.state.get_state()
    first.scale(*parts[2], valid)  # the saved state must not change
    second.state.load_state(saved)

    assert [second.scale(*part, valid) for part in parts[2:]] == expected[2:]


def test_a_state_of_another_width_is_refused():
    with pytest.raises(LearningError, match=r"running"):
        RewardScaler(3, 0.9).state.load_state(RewardScaler(1, 0.9).state.get_state())
    with pytest.raises(LearningError, match=r"mean"):
        ObservationNormaliser(3).state.load_state(ObservationNormaliser(1).state.get_state())
