"""Runs of recipes for a GPU, with the CPU in its place."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_runs import run

from rlflame.config.recipe import LearningSettings, count_units
from rlflame.learning import torch_gradients
from rlflame.learning.ppo import ppo_device
from rlflame.learning.sac import sac_device

PPO = {
    "algorithm": "ppo",
    "environment": {"id": "Pendulum-v1"},
    "rollout": {"num_slots": 2, "envs_per_slot": 4, "steps": 16},
    "network": {"hidden": [16]},
    "ppo": {"minibatch_size": 48, "epochs": 2},
}
SAC = {
    "algorithm": "sac",
    "environment": {"id": "Pendulum-v1"},
    "rollout": {"num_slots": 2, "envs_per_slot": 4, "steps": 8},
    "network": {"hidden": [16]},
    "sac": {"learning_starts": 64, "batch_size": 32, "n_step": 2, "policy_delay": 2},
}
EPISODES = {
    **PPO,
    "environment": {"id": "CartPole-v1"},
    "rollout": {"num_slots": 3, "steps": 500, "unit": "episodes"},
}
CASES = {"ppo": PPO, "sac": SAC, "ppo with whole episodes": EPISODES}


@pytest.fixture
def made(monkeypatch):
    """Use the CPU as the device, and list the algorithms that are made."""
    found = []
    monkeypatch.setattr(torch_gradients, "select_device", lambda kind, rank: "cpu")
    for kind in (ppo_device.DevicePpo, sac_device.DeviceSac):
        whole = kind.__init__

        def note(self, *values, whole=whole, **options):
            found.append(type(self).__name__)
            whole(self, *values, **options)

        monkeypatch.setattr(kind, "__init__", note)
    return found


def recipe(case, iterations=4, **learning):
    return {"stop_at_iterations": iterations, "learning": CASES[case] | learning}


GPU = {"provider": "torch", "device": "cuda"}


@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_nearly_what_numpy_learns_and_is_resumed_exactly(case, made, tmp_path):
    whole = run(recipe(case, **GPU))
    assert made
    made.clear()
    numpy_run = run(recipe(case))
    assert not made
    for name, found in whole.last.policy.items():
        np.testing.assert_allclose(found, numpy_run.last.policy[name], atol=1e-3, err_msg=name)
    resumed = run(recipe(case, **GPU), saved=whole.recorded.snapshots[2])
    assert resumed.state_digest(tmp_path) == whole.state_digest(tmp_path)
    assert resumed.recorded.metrics == whole.recorded.metrics[2:]


def test_a_replay_that_does_not_fit_the_gpu_gives_the_same_run(made, monkeypatch, tmp_path):
    on_device = run(recipe("sac", **GPU))
    monkeypatch.setattr(sac_device, "measure_free_bytes", lambda device: 0)
    on_cpu = run(recipe("sac", **GPU), saved=on_device.recorded.snapshots[2])
    assert on_cpu.state_digest(tmp_path) == on_device.state_digest(tmp_path)


def test_shards_are_divided_between_gpus_and_whole_updates_are_not(made):
    run(recipe("ppo", iterations=1, gradient_shards=2, **GPU))
    assert not made
    units = [
        count_units(LearningSettings.model_validate(PPO | settings))
        for settings in ({}, GPU, GPU | {"gradient_shards": 2})
    ]
    assert units == [2, 1, 4]
