"""One, two or four learners give identical results for all algorithms and shards."""

from __future__ import annotations

from types import SimpleNamespace

import crews
import pytest
from commands import rlflame
from crews import learned_by
from tiny_runs import run

from rlflame.experiment.learners import replica_main
from rlflame.experiment.learners.launcher import LOST_EXIT_CODE
from rlflame.learning.networks import mlp

_ROLLOUT = {"num_slots": 2, "envs_per_slot": 3, "steps": 32}
#: 192 samples: a minibatch of 50 has unequal shards, and the last one of an epoch has 42 samples.
PPO = {
    "gradient_shards": 4,
    "rollout": _ROLLOUT,
    "network": {"hidden": [16]},
    "ppo": {"epochs": 2, "minibatch_size": 50, "learning_rate": 1e-2, "entropy_weight": 0.01},
}
REINFORCE = {
    "algorithm": "reinforce",
    "gradient_shards": 4,
    "rollout": {"unit": "episodes", "num_slots": 2, "envs_per_slot": 3, "steps": 500},
    "network": {"hidden": [16]},
    "reinforce": {"learning_rate": 1e-2},
}
SAC = {
    "algorithm": "sac",
    "gradient_shards": 4,
    "environment": {"id": "Pendulum-v1"},
    "rollout": _ROLLOUT,
    "network": {"hidden": [16]},
    "sac": {"learning_starts": 100, "batch_size": 15, "updates_per_step": 0.05},
}
CASES = {
    "ppo": PPO,
    "ppo on numbers": PPO | {"environment": {"id": "Pendulum-v1"}},
    "ppo, a minibatch with fewer samples than shards": PPO
    | {"ppo": {"epochs": 2, "minibatch_size": 63}},
    "ppo with all that is of a whole minibatch": PPO
    | {"ppo": PPO["ppo"] | {"normalise_advantages": "minibatch", "target_kl": 0.01}},
    "ppo with gsde and stale policies": PPO
    | {
        "environment": {"id": "Pendulum-v1"},
        "network": {"hidden": [16], "exploration": "gsde"},
        "rollout": _ROLLOUT | {"staleness": 1},
    },
    "ppo by torch": PPO | {"provider": "torch"},
    "reinforce": REINFORCE,
    "reinforce by torch": REINFORCE | {"provider": "torch"},
    "sac": SAC,
    "sac with gsde, two lanes and delays": SAC
    | {
        "threads": 2,
        "network": {"hidden": [16], "exploration": "gsde"},
        "sac": SAC["sac"] | {"policy_delay": 2, "max_gradient_norm": 0.1},
    },
    "sac by torch": SAC | {"provider": "torch"},
}


def recipe(learning, iterations=2):
    return {"stop_at_iterations": iterations, "learning": learning}


@pytest.mark.parametrize("case", CASES)
def test_the_number_of_learners_changes_no_bit(case, tmp_path, monkeypatch):
    # With chunks shorter than a shard, their bounds must be aligned with those of the shards.
    monkeypatch.setattr(mlp, "CHUNK_ROWS", 32)
    wanted = recipe(CASES[case])
    alone = run(wanted)
    for learners in (2, 4):
        found = learned_by(learners, wanted, compare_every=1)
        assert found.state_digest(tmp_path) == alone.state_digest(tmp_path)
        assert found.recorded.metrics == alone.recorded.metrics


def test_the_number_of_shards_is_of_the_recipe(tmp_path):
    digests = {
        run(recipe(PPO | {"gradient_shards": shards})).state_digest(tmp_path)
        for shards in (1, 2, 3, 4)
    }
    assert len(digests) == 4


def test_a_run_may_go_on_with_another_number_of_learners(tmp_path):
    """Two iterations with two learners, one with four and one with one."""
    whole = run(recipe(SAC, 4)).state_digest(tmp_path)
    end = crews.resumed_by(recipe(SAC, 4), [(2, 2), (4, 1), (1, 1)])
    assert end.state_digest(tmp_path) == whole


def resolved(*words):
    """The config of a command."""
    spoken = rlflame("train", *words, "--dry-run", "--json")
    assert spoken.code == 0, spoken.err
    return spoken.json()["config"]["learning"]


def test_a_recipe_of_several_learners_is_scaled_as_theirs_is():
    """World size 4, a batch of 4096, a rate of 0.001; other fields are unchanged."""
    words = ("--env", "cartpole", "--learners", "4", "--set", "ppo.minibatch_size=4096")
    words = (*words, "--set", "ppo.learning_rate=0.001", "--set", "rollout.steps=2048")
    exact, theirs = resolved(*words), resolved(*words, "--scale-batch", "--scale-lr")
    assert theirs["ppo"] == exact["ppo"] | {"minibatch_size": 16384, "learning_rate": 0.004}
    assert {**theirs, "ppo": None} == {**exact, "ppo": None}

    words = ("--algo", "sac", "--env", "pendulum", "--learners", "2")
    words = (*words, "--set", "sac.batch_size=2048", "--set", "sac.updates_per_step=1.0")
    exact, theirs = resolved(*words), resolved(*words, "--scale-batch")
    assert theirs["sac"] == exact["sac"] | {"batch_size": 4096, "updates_per_step": 0.5}

    words = ("--algo", "reinforce", "--env", "cartpole", "--learners", "2")
    exact, theirs = resolved(*words), resolved(*words, "--scale-batch")
    assert theirs["rollout"]["num_slots"] == 2 * exact["rollout"]["num_slots"]


def test_no_minibatch_is_scaled_beyond_what_is_collected():
    """An iteration has 4 environments with 32 steps; the scaled minibatch has 256."""
    words = ("train", "--env", "cartpole", "--learners", "8", "--scale-batch", "--dry-run")
    shape = ("rollout.num_slots=2", "rollout.envs_per_slot=2", "ppo.minibatch_size=32")
    words = (*words, *(word for setting in shape for word in ("--set", setting)))
    spoken = rlflame(*words, "--set", "rollout.steps=32")
    assert spoken.code == 2
    assert "minibatches of 256 samples, but an iteration collects 128." in spoken.err
    assert "--set rollout.steps=64" in spoken.err
    assert rlflame(*words, "--set", "rollout.steps=64").code == 0


def test_one_learner_scales_nothing():
    words = ("--env", "cartpole", "--learners", "1")
    assert resolved(*words, "--scale-batch", "--scale-lr") == resolved(*words)


def test_a_learner_whose_others_are_lost_ends_after_a_moment_as_one_of_the_lost(monkeypatch):
    """Its own thread may hang, and could not end the process."""
    done = []
    monkeypatch.setattr(replica_main, "time", SimpleNamespace(sleep=lambda _: done.append("pause")))
    monkeypatch.setattr(replica_main, "_exit", done.append)
    replica_main._exit_soon()
    assert done == ["pause", LOST_EXIT_CODE]
