"""PPO on a device, run on the CPU, with every kind of space: compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest
import space_envs
from device_graphs import refuse_uncaptured
from tiny_runs import run

from rlflame.config.algorithms import PpoSettings
from rlflame.config.recipe import NetworkSettings
from rlflame.learning.buffers.rollout_buffer import concatenate_fragments
from rlflame.learning.device.graph import UpdateGraph
from rlflame.learning.networks.flat_vector import build_network
from rlflame.learning.ppo.loss import NumpyPpo
from rlflame.learning.ppo.ppo import Ppo
from rlflame.learning.ppo.ppo_device import DevicePpo
from rlflame.learning.torch_gradients import TorchPpo

LEARNING = {"rollout": {"num_slots": 2, "envs_per_slot": 2, "steps": 16}}


@pytest.mark.parametrize("id", space_envs.IDS)
def test_updates_are_close_to_numpys(id):
    learning = {**LEARNING, "environment": {"id": id}}
    done = run({"stop_at_iterations": 1, "learning": learning})
    spec = done.beginning.policy_spec
    settings = PpoSettings(epochs=2, minibatch_size=20, entropy_weight=0.05)
    results = []
    for algorithm, provider in ((DevicePpo, TorchPpo), (Ppo, NumpyPpo)):
        parameters = build_network(spec, NetworkSettings(), 0, critic=True)
        before = parameters.data.copy()
        learner = algorithm(
            settings, spec, parameters, provider(parameters, spec), seed=7, columns=4
        )
        batch = concatenate_fragments(done.recorded.fragments[0], done.first)
        metrics = learner.update(batch, 0.2)
        assert metrics["refused_minibatches"] == 0.0
        results.append((learner.get_state()["parameters"], metrics))
    (actual, actual_metrics), (expected, expected_metrics) = results
    assert not np.array_equal(expected, before)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert actual_metrics == pytest.approx(expected_metrics, rel=2e-3, abs=2e-4)


@pytest.mark.parametrize("id", space_envs.IDS)
def test_a_graph_can_capture_all_operations(id, monkeypatch):
    monkeypatch.setattr(UpdateGraph, "run", refuse_uncaptured)
    done = run({"stop_at_iterations": 1, "learning": {**LEARNING, "environment": {"id": id}}})
    spec = done.beginning.policy_spec
    parameters = build_network(spec, NetworkSettings(), 0, critic=True)
    provider = TorchPpo(parameters, spec)
    learner = DevicePpo(PpoSettings(), spec, parameters, provider, seed=7, columns=4)
    batch = concatenate_fragments(done.recorded.fragments[0], done.first)
    assert learner.update(batch, 0.2)["n_updates"] > 0.0
