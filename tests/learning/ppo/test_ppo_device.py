"""PPO on a device, run on the CPU: compared with a plain float64 implementation and with numpy."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import reference
import torch
from batches import PPO_OPTIONS, policy_spec, random_batch, random_network
from device_graphs import refuse_uncaptured, run_after_warm_up
from reference import ReferencePpo

from rlflame.config.algorithms import PpoSettings
from rlflame.errors import LearningError
from rlflame.learning.device.graph import UpdateGraph
from rlflame.learning.ppo.loss import NumpyPpo
from rlflame.learning.ppo.ppo import Ppo
from rlflame.learning.ppo.ppo_device import DevicePpo
from rlflame.learning.torch_gradients import TorchPpo

COLUMNS = 8
VARIANTS = {
    "hopper": ("continuous", "tanh", {}),
    "options": ("discrete", "relu", PPO_OPTIONS),
    "batch": (
        "continuous",
        "relu",
        {"normalise_advantages": "batch", "scale_rewards": False, "max_gradient_norm": None},
    ),
    "gsde": ("gsde", "relu", {"entropy_weight": 0.05}),
    "other numbers": (
        "continuous",
        "tanh",
        {
            "gae_lambda": 0.7,
            "clip_range": 0.4,
            "value_weight": 1.3,
            "adam_epsilon": 1e-3,
            "anneal_learning_rate": False,
            "discount": 0.9,
        },
    ),
}


def make(variant, algorithm=DevicePpo, provider=TorchPpo, normalise=True, **changes):
    kind, activation, settings = VARIANTS[variant]
    given = {"epochs": 3, "minibatch_size": 32, "learning_rate": 2e-3} | settings | changes
    spec = policy_spec(kind, activation=activation, normalise=normalise)
    network, parameters = random_network(np.random.default_rng(0), spec)
    gradients = provider(parameters, network)
    made = algorithm(PpoSettings(**given), network, parameters, gradients, seed=7, columns=COLUMNS)
    return made, parameters, spec


def make_numpy(variant, **changes):
    return make(variant, Ppo, NumpyPpo, **changes)[:2]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hundred_float64_updates_are_those_of_a_plain_implementation(variant):
    # A policy normalises observations in float32, and the plain implementation does not.
    learner, parameters, spec = make(
        variant,
        provider=partial(TorchPpo, dtype=torch.float64),
        normalise=False,
        epochs=10,
        scale_rewards=False,
    )
    plain = ReferencePpo(learner._settings, spec, parameters, seed=7, columns=COLUMNS)
    rng, updates = np.random.default_rng(1), 0.0
    for progress in (0.0, 0.3, 0.6, 0.8):
        batch = random_batch(rng, spec, learner.get_policy(), columns=COLUMNS)
        metrics, wanted = learner.update(batch, progress), plain.update(batch, progress)
        updates = metrics["n_updates"]
        assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert updates >= 100
    found = learner._values.numpy()
    assert np.abs(found - reference.flat(plain.weights)).max() < 1e-9
    assert np.abs(found).max() > 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_updates_are_close_to_numpys(variant):
    for epochs, minibatch_size, limit in ((1, 10_000, 1e-5), (5, 24, 1e-3)):
        changes = {"epochs": epochs, "minibatch_size": minibatch_size}
        learner, weights, spec = make(variant, **changes)
        numpy_learner, numpy_weights = make_numpy(variant, **changes)
        batch = random_batch(np.random.default_rng(2), spec, learner.get_policy(), columns=COLUMNS)
        metrics, wanted = learner.update(batch, 0.2), numpy_learner.update(batch, 0.2)
        assert metrics["n_updates"] == wanted["n_updates"] == (1 if epochs == 1 else 20)
        assert np.abs(weights.data - numpy_weights.data).max() < limit
        assert metrics == pytest.approx(wanted, rel=2e-3, abs=2e-4)


def test_the_kl_limit_stops_the_same_step_as_numpys():
    changes = {"target_kl": 0.02, "epochs": 20, "learning_rate": 1e-3}
    learner, weights, spec = make("hopper", **changes)
    numpy_learner, numpy_weights = make_numpy("hopper", **changes)
    batch = random_batch(np.random.default_rng(7), spec, learner.get_policy(), columns=COLUMNS)
    metrics, wanted = learner.update(batch, 0.0), numpy_learner.update(batch, 0.0)
    assert 3 < metrics["n_updates"] == wanted["n_updates"] < 60
    assert metrics["epochs_done"] == wanted["epochs_done"]
    assert metrics["approx_kl"] == pytest.approx(wanted["approx_kl"], rel=1e-3)
    np.testing.assert_allclose(weights.data, numpy_weights.data, atol=1e-4)


def test_a_refused_minibatch_changes_nothing_and_the_fifth_in_a_row_ends_the_run():
    learner, _, spec = make("hopper", minibatch_size=48, epochs=1)
    batch = random_batch(np.random.default_rng(10), spec, learner.get_policy(), columns=COLUMNS)
    far = dataclasses.replace(batch, log_probs=np.full_like(batch.log_probs, -1e30))
    before = learner.get_state()
    metrics = learner.update(far, 0.0)
    after = learner.get_state()
    for name in ("parameters", "adam.first", "adam.second", "adam.count", "updates"):
        np.testing.assert_array_equal(after[name], before[name])
    assert metrics["refused_minibatches"] == 2.0
    assert "loss" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
    learner.update(far, 0.0)
    good = learner.get_state()
    with pytest.raises(LearningError, match="not finite"):
        learner.update(far, 0.0)
    learner.load_state({**good, "guard": np.zeros(2, np.int64)})
    assert learner.update(batch, 0.0)["refused_minibatches"] == 0.0


def test_nothing_is_learned_after_the_fifth_refusal_in_a_row(monkeypatch):
    """The later minibatches of the iteration are good, but the run is already over."""
    monkeypatch.setattr(DevicePpo, "_make_order", lambda self, epoch, count: np.arange(count))
    learner, _, spec = make("hopper", minibatch_size=COLUMNS, epochs=2, recompute_advantages=False)
    batch = random_batch(np.random.default_rng(9), spec, learner.get_policy(), columns=COLUMNS)
    batch.log_probs[:5] = -1e30
    before = learner.get_state()
    with pytest.raises(LearningError, match="5 times in a row"):
        learner.update(batch, 0.0)
    after = learner.get_state()
    for name in ("parameters", "adam.first", "adam.second", "adam.count", "updates"):
        np.testing.assert_array_equal(after[name], before[name])


def test_a_good_minibatch_ends_the_row_of_bad_ones():
    learner, _, spec = make("hopper", minibatch_size=24, epochs=4, recompute_advantages=False)
    batch = random_batch(np.random.default_rng(9), spec, learner.get_policy(), columns=COLUMNS)
    batch.log_probs[0, 0] = -1e30
    metrics = learner.update(batch, 0.0)
    assert metrics["refused_minibatches"] == 4.0
    assert metrics["n_updates"] == 12.0


@pytest.mark.parametrize("variant", ["hopper", "options"])
def test_a_saved_state_continues_bit_by_bit(variant):
    straight, second = make(variant)[0], make(variant)[0]
    spec = straight._spec
    rng = np.random.default_rng(3)
    batches = [random_batch(rng, spec, straight.get_policy(), columns=COLUMNS) for _ in range(4)]
    for number, batch in enumerate(batches):
        if number == 2:
            second.load_state(straight.get_state())
        metrics = straight.update(batch, 0.1 * number)
        if number >= 2:
            assert second.update(batch, 0.1 * number) == metrics
    for name, array in straight.get_state().items():
        np.testing.assert_array_equal(second.get_state()[name], array)


def test_batches_of_different_lengths_take_turns():
    learner, weights, spec = make("hopper")
    numpy_learner, numpy_weights = make_numpy("hopper")
    rng = np.random.default_rng(4)
    for steps in (12, 9, 9, 12):
        batch = random_batch(rng, spec, learner.get_policy(), steps=steps, columns=COLUMNS)
        learner.update(batch, 0.0)
        numpy_learner.update(batch, 0.0)
    np.testing.assert_allclose(weights.data, numpy_weights.data, atol=1e-3)


def test_the_statistics_of_observations_are_numpys():
    learner, _, spec = make("hopper")
    numpy_learner, _ = make_numpy("hopper")
    rng = np.random.default_rng(5)
    for _ in range(3):
        batch = random_batch(rng, spec, learner.get_policy(), columns=COLUMNS)
        # The episodes of some columns end early, so the steps after them do not count.
        batch.valid[7:, ::2] = False
        learner.update(batch, 0.0)
        numpy_learner.update(batch, 0.0)
        policy = learner.get_policy()
    assert learner._normaliser.count == 3 * batch.valid.sum()
    for name, array in numpy_learner.get_state().items():
        if name.startswith("normaliser."):
            np.testing.assert_allclose(learner.get_state()[name], array, rtol=1e-12, err_msg=name)
    for name, array in numpy_learner._normaliser.make_arrays().items():
        np.testing.assert_allclose(policy[name], array, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("size", [40, 48, 96, 500])
def test_a_graph_changes_nothing_before_its_first_run(size, monkeypatch):
    """On a GPU, the function runs several times before the capture."""
    plain, other = (make("options", minibatch_size=size)[0] for _ in range(2))
    batch = random_batch(np.random.default_rng(6), plain._spec, plain.get_policy(), columns=COLUMNS)
    wanted = plain.update(batch, 0.0)
    monkeypatch.setattr(UpdateGraph, "run", run_after_warm_up)
    assert other.update(batch, 0.0) == wanted
    state = other.get_state()
    for name, array in plain.get_state().items():
        np.testing.assert_array_equal(state[name], array)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_can_capture_all_operations(variant, monkeypatch):
    monkeypatch.setattr(UpdateGraph, "run", refuse_uncaptured)
    learner, _, spec = make(variant)
    batch = random_batch(np.random.default_rng(0), spec, learner.get_policy(), columns=COLUMNS)
    learner.update(batch, 0.0)
