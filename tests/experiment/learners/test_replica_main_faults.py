"""Common faults of distributed learners, which mix up learner and minibatch.

The expected values come from one learner with one shard. Without a fault, several learners differ
from it only by rounding, because the order of the sums differs. Each test inserts a fault, and
checks that the difference would be much larger on the same rollouts.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from crews import learned_by, together
from test_replica_main import PPO, REINFORCE, SAC, recipe
from tiny_runs import run

from rlflame.experiment.learners import replica_main
from rlflame.learning.optim import clip_by_norm
from rlflame.learning.parallel.process_group import release_replicas
from rlflame.learning.parallel.units import Units
from rlflame.learning.ppo import loss, ppo

#: With a small epsilon, Adam would turn a rounding error in a small gradient into a full step.
STRICT_PPO = PPO | {
    "ppo": PPO["ppo"]
    | {
        "adam_epsilon": 1e-2,
        "learning_rate": 0.05,
        "normalise_advantages": "minibatch",
        "max_gradient_norm": 0.1,
        "target_kl": 0.004,
        "epochs": 10,
    }
}
STRICT = {
    "ppo": STRICT_PPO,
    "ppo, standardised over the batch": STRICT_PPO
    | {"ppo": STRICT_PPO["ppo"] | {"normalise_advantages": "batch"}},
    "reinforce": REINFORCE
    | {"reinforce": {"learning_rate": 0.3, "adam_epsilon": 1e-2, "max_gradient_norm": 0.01}},
    "sac": SAC
    | {"sac": SAC["sac"] | {"learning_rate": 0.03, "adam_epsilon": 1e-2, "max_gradient_norm": 0.1}},
}
ROUNDING = 1e-5


def weights(found) -> np.ndarray:
    return np.concatenate([array.ravel() for _, array in sorted(found.last.policy.items())])


def by_one(case: str):
    return run(recipe(STRICT[case] | {"gradient_shards": 1}))


def apart(one, other) -> float:
    return float(np.abs(weights(one) - weights(other)).max())


@pytest.mark.parametrize("case", STRICT)
def test_four_learners_end_where_one_does_with_everything_in_one_piece(case):
    alone, four = by_one(case), learned_by(4, recipe(STRICT[case]))
    assert apart(alone, four) < ROUNDING
    for mine, theirs in zip(alone.recorded.metrics, four.recorded.metrics, strict=True):
        assert mine.get("n_updates") == theirs.get("n_updates")
        assert mine.get("epochs_done") == theirs.get("epochs_done")


def test_advantages_that_each_standardises_alone_would_end_elsewhere(monkeypatch):
    whole = ppo.PpoMinibatch.select_rows

    def part(self, rows):
        mine = whole(self, rows)
        return dataclasses.replace(mine, advantages=ppo.standardise(mine.advantages))

    monkeypatch.setattr(ppo.PpoMinibatch, "select_rows", part)
    assert apart(by_one("ppo"), learned_by(4, recipe(STRICT["ppo"]))) > 30 * ROUNDING


def test_gradients_that_are_clipped_before_they_are_averaged_would_end_elsewhere(monkeypatch):
    whole = Units.compute_gradient

    def gradient(self, rows, parts):
        def clipped(shards, networks):
            for shard in shards:
                for found, sums in parts([shard], networks):
                    share = (shard.rows.stop - shard.rows.start) / rows
                    found /= share
                    clip_by_norm(found[0], 0.1)
                    found *= share
                    yield found, sums

        return whole(self, rows, clipped)

    alone = by_one("ppo")
    monkeypatch.setattr(Units, "compute_gradient", gradient)
    assert apart(alone, learned_by(4, recipe(STRICT["ppo"]))) > 30 * ROUNDING


def test_learners_that_each_watch_their_own_kl_would_stop_apart(monkeypatch):
    """Compare the estimate of each shard with that of the whole minibatch."""
    own: dict[int, list[float]] = {number: [] for number in range(4)}
    whole = Units.compute_gradient

    def gradient(self, rows, parts):
        def noted(shards, networks):
            for shard in shards:
                for found, sums in parts([shard], networks):
                    if "actor" in networks:
                        samples = shard.rows.stop - shard.rows.start
                        own[shard.number].append(sums[0]["approx_kl"] / samples)
                    yield found, sums

        return whole(self, rows, noted)

    monkeypatch.setattr(Units, "compute_gradient", gradient)
    learned_by(4, recipe(STRICT["ppo"], iterations=1))
    limit = loss.KL_STOP_FACTOR * STRICT["ppo"]["ppo"]["target_kl"]
    # All shards end at the same minibatch, long before the last epoch.
    assert len({len(seen) for seen in own.values()}) == 1
    assert 1 < len(own[0]) < 10 * 4
    alone = {next((n for n, kl in enumerate(seen) if kl > limit), None) for seen in own.values()}
    assert len(alone) > 1, "they would have stopped at different minibatches"


def test_no_two_environments_are_alike_however_many_learners_there_are():
    """If each learner collects its own rollouts, they could easily be the same."""
    found = learned_by(2, recipe(PPO, 2))
    columns = [
        fragment.observations[:, row]
        for fragment in found.recorded.fragments[0]
        for row in range(fragment.observations.shape[1])
    ]
    assert len(columns) == 6
    for one, other in itertools.combinations(columns, 2):
        # The first observations differ, and also those after each reset.
        assert not (one == other).all(axis=1).any()
    episodes = [e for part in found.recorded.fragments for f in part for e in f.episodes]
    assert len({episode.seed for episode in episodes}) == len(episodes) > 6


def test_every_learner_makes_the_same_number_of_steps():
    """With unequal numbers of minibatches, one learner would wait forever."""

    def work(seat):
        if seat.rank:
            replica_main.learn(seat)
        else:
            run(recipe(PPO), group=seat)
            release_replicas(seat)
        return list(seat._table.gathers)

    gathers = together(4, work)[-1]
    assert len(set(gathers)) == 1
    # There are 2 iterations of 2 epochs with 4 minibatches, each with gradients, numbers and
    # weights, values once per epoch, weights again before the values of the second epoch, three
    # vectors at the end of an iteration, and the fingerprints.
    assert gathers[0] == 2 * (2 * 4 * 3 + 2 + 1 + 3) + 1
