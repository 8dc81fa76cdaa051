"""Runs of recipes for a GPU, with the CPU in its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_runs import run

from rlflame.config.recipe import LearningSettings, count_units
from rlflame.learning import torch_gradients
from rlflame.learning.ppo import ppo_device
from rlflame.learning.reinforce import reinforce_device
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
REINFORCE = {**EPISODES, "algorithm": "reinforce", "ppo": None}
CASES = {
    "ppo": PPO,
    "sac": SAC,
    "ppo with whole episodes": EPISODES,
    "reinforce": REINFORCE,
}


@pytest.fixture
def made(monkeypatch):
    """Use the CPU as the device, and list the algorithms that are made."""
    found = []
    monkeypatch.setattr(torch_gradients, "select_device", lambda kind, rank: "cpu")
    for kind in (ppo_device.DevicePpo, reinforce_device.DeviceReinforce, sac_device.DeviceSac):
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


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("case", ["ppo", "sac", "reinforce"])
def test_a_lower_precision_learns_nearly_the_same(case, precision, made, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    low = run(recipe(case, precision=precision, **GPU))
    assert set(chosen) == {"high" if precision == "tf32" else "highest"}
    chosen.clear()
    high = run(recipe(case, **GPU))
    assert set(chosen) == {"highest"}
    for name, found in low.last.policy.items():
        np.testing.assert_allclose(found, high.last.policy[name], atol=0.1, err_msg=name)
    # A CPU computes all products in float32 unless the code asks for bf16.
    pairs = ((low.last.policy[name], array) for name, array in high.last.policy.items())
    is_equal = all(np.array_equal(*pair) for pair in pairs)
    assert is_equal == (precision == "tf32")


@pytest.mark.parametrize("settings", [{}, GPU | {"gradient_shards": 2}, {"provider": "torch"}])
def test_a_lower_precision_is_refused_without_whole_updates_on_a_gpu(settings):
    with pytest.raises(ValueError, match="set device to cuda, and gradient_shards to 1"):
        LearningSettings.model_validate(PPO | settings | {"precision": "bf16"})
