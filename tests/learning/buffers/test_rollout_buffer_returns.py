"""Discounted returns and advantages, compared with sums written out term by term."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflame.learning.buffers.rollout_buffer import (
    compute_continued_returns,
    compute_discounted_returns,
    compute_gae,
)


def test_rewards_of_one():
    rewards = np.ones((3, 1))
    ended = np.array([[False], [False], [True]])

    returns = compute_discounted_returns(rewards, ended, 0.99)

    assert returns[:, 0].tolist() == pytest.approx([2.9701, 1.99, 1.0])


def test_an_episodes_end_cuts_the_sum():
    rewards = np.array([[1.0], [10.0], [100.0], [1000.0]])
    ended = np.array([[False], [True], [False], [False]])

    returns = compute_discounted_returns(rewards, ended, 0.5)

    assert returns[:, 0].tolist() == [6.0, 10.0, 600.0, 1000.0]


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        # delta = 1 + 0.5 * 8 - 2 = 3, and the next step's delta 1 + 0.5 * 16 - 4 = 5 at 0.25.
        (False, False, 3.0 + 0.25 * 5.0),
        # Truncated: the value 32 of the hidden final observation counts, and the next step does
        # not.
        (False, True, 1.0 + 0.5 * 32.0 - 2.0),
        # Terminated: no later value counts.
        (True, False, 1.0 - 2.0),
    ],
)
def test_how_a_step_ends(terminated, truncated, expected):
    values = np.array([[2.0], [4.0]])
    following = np.array([[32.0 if truncated else 8.0], [16.0]])

    found = compute_gae(
        np.ones((2, 1)),
        values,
        following,
        np.array([[terminated], [False]]),
        np.array([[truncated], [False]]),
        discount=0.5,
        gae_lambda=0.5,
    )

    assert found[0, 0] == expected
    assert found[1, 0] == 5.0


def test_a_stream_of_ones_that_a_time_limit_cuts_is_worth_the_same_everywhere():
    ended = np.zeros((7, 3), np.bool_)
    ended[6] = True
    valid = np.ones((7, 3), np.bool_)

    returns = compute_continued_returns(np.ones((7, 3)), np.zeros_like(ended), ended, valid, 0.9)

    np.testing.assert_allclose(returns, 10.0)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_where_time_limits_cut_the_mean_goes_on(seed):
    generator = np.random.default_rng(seed)
    steps, columns, discount = 6, 4, 0.8
    lengths = generator.integers(1, steps + 1, columns)
    cut = generator.random(columns) < 0.5
    valid = np.arange(steps)[:, None] < lengths
    last = np.arange(steps)[:, None] == lengths - 1
    rewards = np.where(valid, generator.normal(size=(steps, columns)), 0.0)

    returns = compute_continued_returns(rewards, last & ~cut, last & cut, valid, discount)

    mean = returns[valid].mean()
    for column in range(columns):
        following = mean if cut[column] else 0.0
        for t in reversed(range(lengths[column])):
            following = rewards[t, column] + discount * following
            assert returns[t, column] == pytest.approx(following)


def brute_force(rewards, values, following, terminated, truncated, discount, lam):
    """GAE as the average of k-step advantages, weighted (1 - lambda) lambda^(k - 1)."""
    steps, columns = rewards.shape
    result = np.zeros((steps, columns))
    for c in range(columns):
        for t in range(steps):
            last = t
            while last < steps - 1 and not (terminated[last, c] or truncated[last, c]):
                last += 1
            k_step = []
            for end in range(t, last + 1):
                total = sum(discount ** (i - t) * rewards[i, c] for i in range(t, end + 1))
                if not terminated[end, c]:
                    total += discount ** (end + 1 - t) * following[end, c]
                k_step.append(total - values[t, c])
            n = len(k_step)
            weights = [(1 - lam) * lam**k for k in range(n - 1)] + [lam ** (n - 1)]
            result[t, c] = sum(w * a for w, a in zip(weights, k_step, strict=True))
    return result


def random_columns(seed, steps, columns):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((steps, columns))
    chance = rng.random((steps, columns))
    terminated, truncated = chance < 0.15, chance > 0.85
    following = np.concatenate([values[1:], rng.standard_normal((1, columns))])
    following[truncated] = rng.standard_normal(truncated.sum())
    return rng.standard_normal((steps, columns)), values, following, terminated, truncated


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 12),
    columns=st.integers(1, 4),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_advantages_are_the_weighted_sum_of_all_horizons(seed, steps, columns, discount, lam):
    case = random_columns(seed, steps, columns)

    found = compute_gae(*case, discount, lam)

    np.testing.assert_allclose(found, brute_force(*case, discount, lam), atol=1e-10)


def test_columns_do_not_touch_each_other():
    """Any order and any division of the columns gives the same bits."""
    case = random_columns(3, 20, 6)
    whole = compute_gae(*case, 0.99, 0.95)
    order = np.array([4, 0, 5, 1, 3, 2])
    shuffled = compute_gae(*(array[:, order] for array in case), 0.99, 0.95)
    halves = [compute_gae(*(a[:, part] for a in case), 0.99, 0.95) for part in np.split(order, 2)]

    np.testing.assert_array_equal(shuffled, whole[:, order])
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), whole[:, order])
    rewards, _, _, terminated, truncated = case
    returns = compute_discounted_returns(rewards, terminated | truncated, 0.99)
    np.testing.assert_array_equal(
        compute_discounted_returns(rewards[:, order], (terminated | truncated)[:, order], 0.99),
        returns[:, order],
    )


def test_inputs_are_left_alone():
    case = random_columns(4, 9, 3)
    before = [array.copy() for array in case]
    compute_gae(*case, 0.99, 0.95)
    compute_discounted_returns(case[0], case[3], 0.99)

    for array, copy in zip(case, before, strict=True):
        np.testing.assert_array_equal(array, copy)
