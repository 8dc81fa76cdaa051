"""SAC on a device, run on the CPU: compared with a plain float64 loop and with numpy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from device_graphs import run_after_warm_up
from sac_cases import Plain, learner, networks, owed, transitions

from rlflame.config.algorithms import SacSettings
from rlflame.errors import LearningError
from rlflame.learning.base import ReplayBatch
from rlflame.learning.device.graph import UpdateGraph
from rlflame.learning.sac.sac_device import DeviceSac

SETTINGS = {
    "default": {},
    "everything else": {
        "critic_learning_rate": 2e-3,
        "entropy_learning_rate": 5e-3,
        "policy_delay": 2,
        "target_update_interval": 3,
        "target_update_rate": 0.1,
        "max_gradient_norm": 0.2,
    },
    "fixed entropy": {"entropy_coefficient": 0.1},
}
KINDS = {
    "plain": {},
    "tanh": {"activation": "tanh"},
    "gsde": {"exploration": "gsde"},
    "batch": {"norm": "batch"},
    "quantiles": {"quantiles": 5, "drop_count": 1},
    "quantiles and batch": {"norm": "batch", "quantiles": 5, "drop_count": 1},
}


def make_settings(case, kind="plain"):
    given = SETTINGS[case]
    if "batch" in kind:
        given = {n: v for n, v in given.items() if not n.startswith("target_update")}
    return SacSettings(**({"learning_rate": 1e-3} | given))


@pytest.mark.parametrize("case", ["default", "everything else"])
@pytest.mark.parametrize("kind", ["plain", "gsde", "batch"])
def test_a_hundred_float64_updates_are_those_of_a_plain_loop(case, kind):
    settings, nets = make_settings(case, kind), networks(**KINDS[kind])
    plain = Plain(nets, settings)
    device = DeviceSac(settings, nets, seed=7, dtype=torch.float64)
    for number in range(100):
        plain.update(number, transitions(number))
    device.update(owed(0, 70), 0.0)
    device.update(owed(70, 30), 0.0)
    pairs = [(plain.actor, device._actor.values), (plain.critics, device._critics.values)]
    if device._targets is not None:
        pairs.append((plain.targets, device._targets.values))
    if device._moments is not None:
        pairs.append((plain.running, device._moments._running))
    for weights, values in pairs:
        expected = torch.cat([tensor.detach().flatten() for tensor in weights.values()])
        assert (values.flatten() - expected).abs().max() < 1e-9
    weight = float(plain.log_weight.detach())
    assert float(device._log_weight_tensor) == pytest.approx(weight, abs=1e-9)


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_updates_are_close_to_numpys(case, kind):
    settings = make_settings(case, kind)
    for updates, limit in ((1, 1e-5), (20, 1e-3)):
        ours, theirs = networks(**KINDS[kind]), networks(**KINDS[kind])
        metrics = DeviceSac(settings, ours, seed=7).update(owed(0, updates), 0.1)
        wanted = learner(settings, theirs).update(owed(0, updates), 0.1)
        assert metrics == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        for name in ("actor", "critics", "targets"):
            found, expected = getattr(ours, name).data, getattr(theirs, name).data
            if len(found):
                assert np.abs(found - expected).max() < limit


def test_normalised_observations_are_those_of_numpy():
    pairs, settings = [], SacSettings()
    for make in (
        lambda nets: DeviceSac(settings, nets, seed=7),
        lambda nets: learner(settings, nets),
    ):
        nets = networks()
        nets = dataclasses.replace(nets, spec=dataclasses.replace(nets.spec, normalise=True))
        made = make(nets)
        state = made.get_state()
        rng = np.random.default_rng(5)
        state["normaliser.count"] = np.array(10.0)
        state["normaliser.mean"] = rng.standard_normal(5)
        state["normaliser.squares"] = rng.uniform(1.0, 40.0, 5)
        made.load_state(state)
        fresh = type("Fresh", (), {"observations": np.ones((3, 2, 5), np.float32),
                                   "valid": np.ones((3, 2), bool)})  # fmt: skip
        batch = ReplayBatch(fresh, 0, 5, transitions)
        pairs.append((made.update(batch, 0.0), nets))
    (metrics, ours), (wanted, theirs) = pairs
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(ours.critics.data, theirs.critics.data, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_continues_bit_by_bit(kind):
    settings = make_settings("everything else", kind)
    straight = DeviceSac(settings, networks(**KINDS[kind]), seed=7)
    resumed = DeviceSac(settings, networks(seed=3, **KINDS[kind]), seed=7)
    straight.update(owed(0, 70), 0.0)
    resumed.load_state(straight.get_state())
    assert straight.update(owed(70, 9), 0.5) == resumed.update(owed(70, 9), 0.5)
    state = resumed.get_state()
    for name, array in straight.get_state().items():
        np.testing.assert_array_equal(state[name], array)


def test_the_state_has_the_form_of_numpys():
    nets = networks(norm="batch")
    ours, theirs = DeviceSac(SacSettings(), nets, seed=7), learner(SacSettings(), nets)
    shapes = [
        {name: (array.dtype, array.shape) for name, array in made.get_state().items()}
        for made in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("field", ["rewards", "observations"])
def test_an_update_that_is_not_finite_changes_nothing_and_the_fifth_in_a_row_ends_the_run(field):
    def draw(update):
        drawn = transitions(update)
        if update in bad:
            getattr(drawn, field)[0] = math.inf
        return drawn

    device = DeviceSac(SacSettings(), networks(), seed=7)
    bad = {0, 1, 2}
    before = device.get_state()
    metrics = device.update(ReplayBatch(None, 0, 3, draw), 0.0)
    assert metrics["refused_minibatches"] == 3.0
    assert all(map(math.isfinite, metrics.values()))
    after = device.get_state()
    assert {n for n in after if not np.array_equal(after[n], before[n])} == {"guard"}
    device.update(ReplayBatch(None, 3, 2, draw), 0.0)
    bad = set(range(5, 10))
    with pytest.raises(LearningError, match="not finite 5 times in a row"):
        device.update(ReplayBatch(None, 5, 5, draw), 0.0)


@pytest.mark.parametrize("given", [{"policy_delay": 64}, {"target_update_interval": 63}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_changes_nothing_before_its_first_run(kind, given, monkeypatch):
    """On a GPU, the function runs several times before the capture."""
    if "batch" in kind:
        given = {"policy_delay": 64}
    settings = SacSettings(**given)
    plain, other = (DeviceSac(settings, networks(**KINDS[kind]), seed=7) for _ in range(2))
    wanted = plain.update(owed(1, 70), 0.0)
    monkeypatch.setattr(UpdateGraph, "run", run_after_warm_up)
    assert other.update(owed(1, 70), 0.0) == wanted
    state = other.get_state()
    for name, array in plain.get_state().items():
        np.testing.assert_array_equal(state[name], array)


def test_an_error_of_the_replay_leaves_no_arrays_for_the_next_update():
    def draw(update):
        if update == 3:
            raise OSError("the replay is gone")
        return transitions(update)

    plain, other = (DeviceSac(SacSettings(), networks(), seed=7) for _ in range(2))
    before = other.get_state()
    with pytest.raises(OSError, match="the replay is gone"):
        other.update(ReplayBatch(None, 0, 5, draw), 0.0)
    other.load_state(before)
    assert other.update(owed(0, 5), 0.0) == plain.update(owed(0, 5), 0.0)
