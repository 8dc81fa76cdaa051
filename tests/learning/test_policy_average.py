"""The average of policies, compared with plain sums, and its stored state."""

from __future__ import annotations

import numpy as np
import pytest

from rlflame.errors import LearningError
from rlflame.learning.policy_average import PolicyAverage


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


def shares(newest: int, over: int) -> list[float]:
    """The weight of each version in an average over the last twentieth at most."""
    found: list[float] = []
    for version in range(1, newest + 1):
        full = 1.0 / min(over, max(1.0, version / 20))
        found = [*(share * (1.0 - full) for share in found), full]
    return found


START = {name: np.zeros_like(array) for name, array in versions(1)[0].items()}


@pytest.mark.parametrize("over", [1, 2, 5, 100])
def test_older_versions_fade_and_the_first_ones_soon(over):
    seen = versions(130)
    average = PolicyAverage(over, START)
    for newest, policy in enumerate(seen, start=1):
        average.update(policy)
        found = average.get_policy(policy)
        counted = shares(newest, over)
        assert sum(counted) == pytest.approx(1.0)
        for name in ("actor.0.weight", "actor.log_std"):
            expected = sum(
                s * p[name].astype(float) for s, p in zip(counted, seen, strict=False) if s
            )
            np.testing.assert_allclose(found[name], expected, rtol=2e-6, atol=1e-8)
            assert found[name].dtype == np.float32
        if newest <= 20:
            assert found["actor.log_std"].tobytes() == policy["actor.log_std"].tobytes()
        # The statistics of the normaliser are the newest ones.
        np.testing.assert_array_equal(found["normaliser.mean"], policy["normaliser.mean"])


def test_the_first_versions_are_kept_to_the_last_bit():
    average = PolicyAverage(20, START)
    for value in (1e30, 1e-3):
        newest = {"actor.log_std": np.full(2, value, np.float32)}
        average.update(newest)
        assert (
            average.get_policy({})["actor.log_std"].tobytes() == newest["actor.log_std"].tobytes()
        )


def test_without_a_number_and_before_the_first_version_it_is_the_newest():
    first, second = versions(2)
    for average in (PolicyAverage(None, START), PolicyAverage(3, START)):
        assert average.get_policy(first) == first
    average = PolicyAverage(None, START)
    average.update(first)
    assert average.get_policy(second) == second
    assert average.get_state() == {}
    average.load_state({}, first)


def test_what_is_handed_out_is_nobody_else_s():
    first, second = versions(2)
    before = {name: array.copy() for name, array in first.items()}
    average = PolicyAverage(2, START)
    average.update(first)
    held, saved = average.get_policy(first), average.get_state()
    average.update(second)
    for name, array in before.items():
        np.testing.assert_array_equal(first[name], array)
        np.testing.assert_array_equal(held[name], array)
        if name in saved:
            np.testing.assert_array_equal(saved[name], array)


@pytest.mark.parametrize("taken", [0, 1, 30, 81, 99])
def test_one_that_is_taken_up_again_goes_on_to_the_same_bits(taken):
    seen = versions(100)
    whole, begun, again = (PolicyAverage(4, START) for _ in range(3))
    for policy in seen:
        whole.update(policy)
    for policy in seen[:taken]:
        begun.update(policy)
    again.load_state(begun.get_state(), seen[taken - 1] if taken else START)
    for policy in seen[taken:]:
        again.update(policy)
    for name, array in whole.get_policy(seen[-1]).items():
        assert array.tobytes() == again.get_policy(seen[-1])[name].tobytes()


@pytest.mark.parametrize("resumed", [False, True])
def test_an_iteration_that_changed_no_weight_counts_for_nothing(resumed):
    """Learning has not begun, or all updates were refused; statistics may change."""
    first, second = versions(2)
    plain, idle = PolicyAverage(9, START), PolicyAverage(9, START)
    for policy in (START, first, second):
        plain.update(policy)
        for n in range(4):
            moved = np.full(3, n, np.float32)
            if resumed and n == 2:
                state, idle = idle.get_state(), PolicyAverage(9, START)
                idle.load_state(state, policy)
            idle.update({**policy, "normaliser.mean": moved})
    assert int(idle.get_state()["versions"]) == 2
    for name, array in plain.get_policy(second).items():
        np.testing.assert_array_equal(idle.get_policy(second)[name], array)


def test_over_very_many_versions_what_each_adds_is_not_lost():
    average, over = PolicyAverage(50_000, START), 20_000
    for step in range(1, over + 1):
        average.update({"actor.log_std": np.full(1, 1.0 + step * 1e-6, np.float32)})
    # The weight of version n is proportional to n to the power of 19, so the mean is at 20/21.
    (found,) = average.get_policy({})["actor.log_std"]
    assert found == pytest.approx(1.0 + 20 / 21 * over * 1e-6, abs=2e-6)


def test_a_state_of_another_shape_is_refused():
    first, other = versions(2)
    average, another = PolicyAverage(4, START), PolicyAverage(4, START)
    average.update(first)
    state = average.get_state()
    with pytest.raises(LearningError, match="versions is missing"):
        another.load_state({}, first)
    with pytest.raises(LearningError, match=r"actor\.log_std is missing"):
        another.load_state({"versions": state["versions"]}, {"actor.log_std": np.zeros(2)})
    other["actor.log_std"] = np.zeros(3, np.float32)
    with pytest.raises(LearningError, match=r"actor\.log_std is float64 \(2,\)"):
        another.load_state(state, other)
