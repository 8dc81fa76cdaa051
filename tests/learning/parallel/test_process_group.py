"""The division of a minibatch into shards, and the sums of their results."""

from __future__ import annotations

import math

import numpy as np
import pytest
from crews import together
from hypothesis import given
from hypothesis import strategies as st

from rlflame.errors import LearningError
from rlflame.learning.optim import clip_by_norm
from rlflame.learning.parallel.process_group import Shards


@given(st.integers(1, 40), st.integers(1, 300))
def test_every_row_is_in_one_shard_and_none_is_much_longer(count, rows):
    shards = Shards(count).split(rows)
    covered = [row for shard in shards for row in range(shard.rows.start, shard.rows.stop)]
    sizes = [shard.rows.stop - shard.rows.start for shard in shards]

    assert covered == list(range(rows))
    assert len(shards) == (count if rows >= count else 1)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


#: In float32, adding 1 to the large number loses the 1, wherever this happens in the sum.
AWKWARD = np.array([1.0, 1e8, -1e8, 1.0, 1.0, -1.0, 1e8, -1e8], np.float32)


def parts(shard):
    """A gradient of two numbers, and a sum that needs float64."""
    return np.repeat(AWKWARD[shard.number], 2), {"loss": 2.0**40 + shard.number}


def test_shards_are_added_one_after_the_other_in_float32():
    gradient, sums = Shards(8).compute_gradient(80, parts)
    # By hand: 1e8 absorbs 1, -1e8 cancels 1e8, then 0 + 1 + 1 - 1 = 1, which 1e8 absorbs.
    np.testing.assert_array_equal(gradient, np.zeros(2, np.float32))
    assert sums == {"loss": 8 * 2.0**40 + 28}
    # In the reverse order: 0 - 1 + 1 + 1 = 1 is absorbed, and the last 1 is not.
    backward, _ = Shards(8).compute_gradient(
        80, lambda shard: (AWKWARD[7 - shard.number, None], {})
    )
    assert backward == [1.0]


@pytest.mark.parametrize("learners", [2, 4, 8])
def test_any_number_of_learners_adds_in_the_same_order(learners):
    computed = []

    def work(seat):
        def part(shard):
            computed.append((seat.rank, shard.number))
            return parts(shard)

        gradient, sums = Shards(8, seat).compute_gradient(81, part)
        return gradient.tobytes(), sums

    alone, sums = Shards(8).compute_gradient(81, parts)
    assert together(learners, work) == [(alone.tobytes(), sums)] * learners
    # Each shard is computed once, and each learner computes the same number of shards.
    assert sorted(number for _, number in computed) == list(range(8))
    assert {sum(rank == n for rank, _ in computed) for n in range(learners)} == {8 // learners}


def test_unequal_shards_are_weighted_by_their_true_numbers_of_samples():
    """Seven samples in three shards: the mean of samples, not the mean of means."""
    samples = np.array([1, 2, 3, 4, 5, 6, 70], np.float32)

    def part(shard):
        own = samples[shard.rows]
        return np.array([own.sum() / len(samples)], np.float32), {"count": float(len(own))}

    gradient, sums = Shards(3).compute_gradient(len(samples), part)
    assert gradient[0] == pytest.approx(91 / 7)
    assert sums == {"count": 7.0}
    of_means = np.mean([(1 + 2 + 3) / 3, (4 + 5) / 2, (6 + 70) / 2])
    assert gradient[0] != pytest.approx(of_means, rel=0.01)


def test_the_whole_is_clipped_and_not_its_parts():
    """Two large gradients nearly cancel out. Clipped separately, they would not."""
    halves = np.array([[30.0, 40.0], [-30.0, -39.0]], np.float32)

    def work(seat):
        gradient, _ = Shards(2, seat).compute_gradient(2, lambda shard: (halves[shard.number], {}))
        return clip_by_norm(gradient, 0.5), gradient.copy()

    for norm, clipped in together(2, work):
        assert norm == pytest.approx(1.0)  # the norm of (0, 1)
        np.testing.assert_allclose(clipped, [0.0, 0.5], atol=1e-6)
    apart = sum(half * 0.5 / math.hypot(*half) for half in halves)
    assert not np.allclose(apart, [0.0, 0.5], atol=0.1)


def test_too_few_rows_are_everybodys_own_work():
    def work(seat):
        asked = []

        def part(shard):
            asked.append(shard.rows)
            return np.ones(1, np.float32), {}

        Shards(8, seat).compute_gradient(5, part)
        return asked

    assert together(2, work) == [[slice(0, 5)]] * 2


@pytest.mark.parametrize(("every", "update"), [(1, 3), (2, 4), (5, None)])
def test_learners_that_come_apart_are_found_at_the_next_comparison(every, update):
    """One learner has a different bit after its third update. Four updates are made."""

    def work(seat):
        weights = np.zeros(3, np.float32)
        shards = Shards(2, seat)
        shards.compare_every(every, lambda: {"weights": weights})
        for number in range(1, 5):
            try:
                gradient, _ = shards.compute_gradient(2, lambda shard: (np.ones(3, np.float32), {}))
            except LearningError as error:
                return number, str(error)
            weights += gradient
            if number == 2 and seat.rank == 1:
                weights[1] = np.nextafter(weights[1], np.float32(9))
        return None

    found = together(2, work)
    if update is None:
        assert found == [None, None]
    else:
        assert found == [(update, "Learners 1 hold other weights than learner 0.")] * 2
