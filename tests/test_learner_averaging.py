"""The average of policies against sums in plain numbers; what a checkpoint keeps of it."""

from __future__ import annotations

import numpy as np
import pytest

from rlflame.errors import LearningError
from rlflame.learner.averaging import PolicyAverage


def versions(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "actor.0.weight": rng.normal(size=(3, 2)).astype(np.float32),
            "actor.log_std": rng.normal(size=2).astype(np.float32),
            "normaliser.mean": rng.normal(size=3).astype(np.float32),
        }
        for _ in range(count)
    ]


def weight(version: int, newest: int, over: int) -> float:
    """What a version counts for once another is the newest, both counted from one."""
    full = 1.0 / over
    if newest <= over:
        return 1.0 / newest
    fading = (1.0 - full) ** (newest - max(version, over))
    return full * fading


@pytest.mark.parametrize("over", [1, 2, 5, 100])
def test_each_counts_the_same_at_first_and_then_the_older_ones_fade(over):
    average, seen = PolicyAverage(over), versions(12)
    for newest, policy in enumerate(seen, start=1):
        average.follow(policy)
        shares = [weight(version, newest, over) for version in range(1, newest + 1)]
        assert sum(shares) == pytest.approx(1.0)
        found = average.policy(policy)
        for name in ("actor.0.weight", "actor.log_std"):
            expected = sum(s * p[name].astype(float) for s, p in zip(shares, seen, strict=False))
            np.testing.assert_allclose(found[name], expected, atol=1e-6)
            assert found[name].dtype == np.float32
        # What observations are normalised by is as the newest has it.
        np.testing.assert_array_equal(found["normaliser.mean"], policy["normaliser.mean"])


def test_without_a_number_and_before_the_first_version_it_is_the_newest():
    first, second = versions(2)
    for average in (PolicyAverage(None), PolicyAverage(3)):
        assert average.policy(first) == first
    average = PolicyAverage(None)
    average.follow(first)
    assert average.policy(second) == second
    assert average.state() == {}
    average.load_state({}, first)


def test_what_is_handed_out_is_nobody_else_s():
    first, second = versions(2)
    before = {name: array.copy() for name, array in first.items()}
    average = PolicyAverage(2)
    average.follow(first)
    held, saved = average.policy(first), average.state()
    average.follow(second)
    for name, array in before.items():
        np.testing.assert_array_equal(first[name], array)
        np.testing.assert_array_equal(held[name], array)
        if name in saved:
            np.testing.assert_array_equal(saved[name], array)


@pytest.mark.parametrize("taken", [0, 1, 4, 9])
def test_one_that_is_taken_up_again_goes_on_to_the_same_bits(taken):
    whole, begun, seen = PolicyAverage(4), PolicyAverage(4), versions(12)
    for policy in seen:
        whole.follow(policy)
    for policy in seen[:taken]:
        begun.follow(policy)
    again = PolicyAverage(4)
    again.load_state(begun.state(), seen[0])
    for policy in seen[taken:]:
        again.follow(policy)
    for name, array in whole.policy(seen[-1]).items():
        assert array.tobytes() == again.policy(seen[-1])[name].tobytes()


def test_a_state_of_another_shape_is_refused():
    first, other = versions(2)
    average = PolicyAverage(4)
    average.follow(first)
    state = average.state()
    with pytest.raises(LearningError, match="count is missing"):
        PolicyAverage(4).load_state({}, first)
    with pytest.raises(LearningError, match=r"actor\.log_std is missing"):
        PolicyAverage(4).load_state({"count": state["count"]}, {"actor.log_std": np.zeros(2)})
    other["actor.log_std"] = np.zeros(3, np.float32)
    with pytest.raises(LearningError, match=r"actor\.log_std is float32 \(2,\)"):
        PolicyAverage(4).load_state(state, other)
