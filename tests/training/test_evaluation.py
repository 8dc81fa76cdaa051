"""Evaluations: the same episodes everywhere, and correct statistics."""

from __future__ import annotations

import dataclasses
import statistics

import failpoints
import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflame.experiment import components
from rlflame.fleet.inline import InlineFleet
from rlflame.fleet.local import LocalFleet
from rlflame.rollout.policy import Policy
from rlflame.rollout.seeding import Role, make_reset_seed
from rlflame.rollout.task import EpisodeStat
from rlflame.statistics import compute_interquartile_means
from rlflame.storage.metrics import NAMES
from rlflame.training.evaluation import (
    EvaluationPlan,
    compute_paired_difference,
    evaluate,
    split_episodes,
    summarise_episodes,
)


def untrained(env):
    """A policy of full width whose weights have an effect."""
    recipe = failpoints.config(
        env, learning={"network": {"last_layer_scale": 1.0}, "rollout": {"envs_per_slot": 4}}
    ).recipe
    return components.make_initial_checkpoint(
        recipe, components.make_env_spec(recipe.learning.environment)
    )


def scored(fleet, begun, **plan):
    return evaluate(fleet, begun.env, begun.policy_spec, begun.policy, EvaluationPlan(**plan))


# The episodes.


@pytest.mark.parametrize("env", ["CartPole-v1", "Hopper-v5"])
def test_episodes_are_those_of_gymnasium_with_the_seeds_that_are_named(env):
    begun = untrained(env)
    with InlineFleet() as fleet:
        record = scored(fleet, begun, episodes=10, seed=7)
    spec = begun.policy_spec
    policy = Policy(spec, begun.policy)
    world = gymnasium.make(env)
    for k in (0, 3, 9):
        rows = np.zeros((spec.width, spec.observation_size), np.float32)
        observation, _ = world.reset(seed=make_reset_seed(7, Role.EVALUATION_RESET, k))
        total, length, over = 0.0, 0, False
        while not over:
            rows[k % spec.width] = observation
            action = policy.to_environment(policy.mode(rows))[k % spec.width]
            observation, reward, terminated, truncated, _ = world.step(action)
            total, length, over = total + float(reward), length + 1, terminated or truncated
        assert (record.returns[k], record.lengths[k]) == (total, length)
    world.close()


@pytest.mark.parametrize("stochastic", [False, True])
def test_neither_workers_nor_the_number_of_episodes_change_an_episode(stochastic):
    begun = untrained("CartPole-v1")
    plan = {"seed": 3, "stochastic": stochastic}
    with InlineFleet() as fleet:
        many = scored(fleet, begun, episodes=19, **plan)
        for episodes in (1, 8, 9, 16):
            few = scored(fleet, begun, episodes=episodes, **plan)
            assert few.returns == many.returns[:episodes]
            assert few.lengths == many.lengths[:episodes]
        assert scored(fleet, begun, episodes=19, seed=4).returns != many.returns
        other = scored(fleet, begun, episodes=19, seed=3, stochastic=not stochastic)
        assert other.returns != many.returns
    for workers in (1, 3):
        with LocalFleet(workers) as fleet:
            assert scored(fleet, begun, episodes=19, **plan) == many
            assert scored(fleet, begun, episodes=4, **plan).returns == many.returns[:4]
    assert len(set(many.returns)) > 3


@given(st.integers(1, 70), st.sampled_from((8, 16, 64)), st.integers(1, 40))
def test_every_episode_has_one_task_and_every_worker_has_one(episodes, width, workers):
    shares = split_episodes(episodes, width, workers)
    covered = [first + k for first, count in shares for k in range(count)]
    assert covered == list(range(episodes))
    assert all(first // width == (first + count - 1) // width for first, count in shares)
    # With groups of one width each, the number of groups is `episodes / width`, rounded up.
    assert len(shares) >= -(-episodes // width)
    if episodes <= workers:
        assert len(shares) == episodes
    # No task is longer than an even share of the work.
    assert max(count for _, count in shares) <= -(-episodes // workers)


def test_episodes_that_do_not_end_are_cut():
    begun = untrained("Pendulum-v1")
    with InlineFleet() as fleet:
        assert scored(fleet, begun, episodes=3, max_episode_steps=5).lengths == (5, 5, 5)


class Backwards:
    """A fleet whose fragments arrive in reverse order, with reversed episodes."""

    def __init__(self, inner, fail=""):
        self.inner = inner
        self.capacity = inner.capacity
        self.fail = fail
        self.policies = 0
        self.cancelled = 0

    def put(self, policy):
        self.policies += 1
        return self.inner.put(policy)

    def release(self, name):
        self.policies -= 1
        self.inner.release(name)

    def submit(self, tasks):
        if self.fail == "submit":
            raise OSError(self.fail)
        self._batch = list(self.inner.submit(tasks))[::-1]
        return self

    def __iter__(self):
        if self.fail == "gather":
            raise OSError(self.fail)
        for fragment in self._batch:
            yield dataclasses.replace(fragment, episodes=fragment.episodes[::-1])

    def cancel(self):
        self.cancelled += 1


def test_episodes_are_in_order_whatever_the_order_they_arrive_in():
    begun = untrained("CartPole-v1")
    with InlineFleet() as fleet:
        backwards = Backwards(fleet)
        expected = scored(fleet, begun, episodes=19)
        assert scored(backwards, begun, episodes=19) == expected
    assert (backwards.policies, backwards.cancelled) == (0, 1)


@pytest.mark.parametrize("fail", ["submit", "gather"])
def test_the_policy_is_released_whatever_happens(fail):
    with InlineFleet() as fleet:
        backwards = Backwards(fleet, fail)
        with pytest.raises(OSError, match=fail):
            scored(backwards, untrained("CartPole-v1"), episodes=3)
    assert backwards.policies == 0


# The statistics.


@pytest.mark.parametrize("n", range(1, 14))
def test_the_interquartile_mean_is_that_of_four_copies_of_every_sample(n):
    """Four copies of n samples divide into quarters, so counting replaces weights."""
    samples = np.random.default_rng(n).normal(size=n) * 10
    copies = sorted(np.repeat(samples, 4))
    assert compute_interquartile_means(samples) == pytest.approx(
        statistics.fmean(copies[n : 3 * n])
    )


def stats(returns, lengths):
    return [
        EpisodeStat(i, i, 0, value, length, False, 0)
        for i, (value, length) in enumerate(zip(returns, lengths, strict=True))
    ]


def test_a_record_says_what_its_episodes_were():
    returns, lengths = (4.0, -1.5, 10.0, 4.0, 0.25), (1, 2, 3, 4, 7)
    plan = EvaluationPlan(episodes=5, seed=11, stochastic=True, max_episode_steps=99)
    record = summarise_episodes(plan, stats(returns, lengths))
    assert record.mean == pytest.approx(statistics.fmean(returns))
    assert record.std == pytest.approx(statistics.pstdev(returns))
    assert (record.min, record.max) == (-1.5, 10.0)
    assert record.length_mean == pytest.approx(17 / 5)
    assert record.low <= record.mean <= record.high
    assert (record.returns, record.lengths, record.episodes) == (returns, lengths, 5)
    assert (record.seed, record.stochastic, record.max_episode_steps) == (11, True, 99)
    assert record.to_metrics().keys() <= NAMES.keys()


def test_a_difference_is_that_of_the_pairs():
    plan = EvaluationPlan(episodes=4)
    a = summarise_episodes(plan, stats((10.0, 200.0, 30.0, 4000.0), (1, 1, 1, 1)))
    b = summarise_episodes(plan, stats((9.0, 198.0, 29.0, 3998.0), (1, 1, 1, 1)))
    # The differences of the pairs are 1, 2, 1, 2, without the spread of the episodes.
    found = compute_paired_difference(a, b)
    assert found["mean"] == pytest.approx(1.5)
    assert 1.0 <= found["low"] <= found["high"] <= 2.0
    assert found["low"] < 1.5 < found["high"]
    assert compute_paired_difference(b, a)["mean"] == -found["mean"]


@pytest.mark.parametrize("change", [{"seed": 1}, {"stochastic": True}, {"episodes": 3}])
def test_only_the_same_episodes_are_paired(change):
    plan = EvaluationPlan(episodes=4)
    a = summarise_episodes(plan, stats((1.0, 2.0, 3.0, 4.0), (1, 1, 1, 1)))
    other = dataclasses.replace(plan, **change)
    b = summarise_episodes(
        other, stats((1.0, 2.0, 3.0, 4.0)[: other.episodes], (1, 1, 1, 1)[: other.episodes])
    )
    with pytest.raises(ValueError, match="paired"):
        compute_paired_difference(a, b)
