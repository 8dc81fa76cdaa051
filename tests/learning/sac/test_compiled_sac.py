"""The compiled loss of SAC has the bits of `NumpySac`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sac_cases import learner, minibatch, networks, owed

from rlflame.config.algorithms import SacSettings
from rlflame.learning.kernels.library import load_kernels
from rlflame.learning.networks.mlp import MLP
from rlflame.learning.parallel.thread_pair import ThreadPair
from rlflame.learning.sac import compiled_sac
from rlflame.learning.sac.compiled_sac import CompiledSac, make_sac
from rlflame.learning.sac.loss import NumpySac

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="the kernels were not compiled")


def compute_all(provider, batch) -> list[object]:
    results: list[object] = []
    with np.errstate(all="ignore"):
        results.append(provider.sample_actions(batch).tobytes())
        for compute in (provider.compute_critic_gradient, provider.compute_actor_gradient):
            gradient, sums = compute(batch, 0.2, len(batch.rewards) + 3)
            results += [gradient.tobytes(), repr(sums)]
    return results


def assert_equal_bits(nets, batches, threads: int = 1) -> None:
    compiled, plain = make_sac(nets, ThreadPair(threads)), NumpySac(nets, ThreadPair(1), MLP)
    assert isinstance(compiled, CompiledSac)
    for batch in batches:
        assert compute_all(compiled, batch) == compute_all(plain, batch)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("actions", [1, 2, 3])
@pytest.mark.parametrize("hidden", [(), (16,), (24, 16), (8, 16, 8)])
def test_gradients_have_the_same_bits(hidden, actions, activation, threads):
    nets = networks(activation=activation, hidden=hidden, actions=actions)
    batches = [minibatch(seed, rows, actions) for seed, rows in enumerate((33, 33, 2, 64, 1, 33))]
    assert_equal_bits(nets, batches, threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", [
    {"quantiles": 5, "drop_count": 1}, {"exploration": "gsde"},
    {"quantiles": 2, "exploration": "gsde"},
])  # fmt: skip
def test_gradients_with_options_have_the_same_bits(options, threads):
    assert_equal_bits(networks(**options), [minibatch(seed) for seed in range(3)], threads)


@pytest.mark.parametrize("field", ["observations", "actions", "rewards", "next_observations"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38, -0.0])
def test_gradients_of_unusual_numbers_have_the_same_bits(value, field):
    batch = minibatch(3)
    getattr(batch, field)[4] = value
    assert_equal_bits(networks(), [batch])


def test_each_pass_reads_the_batch_that_it_is_given():
    compiled, plain = make_sac(networks(), ThreadPair(1)), NumpySac(networks(), ThreadPair(1), MLP)
    assert isinstance(compiled, CompiledSac)
    results = []
    for provider in (compiled, plain):
        provider.sample_actions(minibatch(1))
        gradient, sums = provider.compute_critic_gradient(minibatch(2), 0.2, 33)
        results.append((gradient.tobytes(), sums))
    assert results[0] == results[1]


def test_a_shard_has_the_same_bits():
    batch = minibatch(5, 64)
    assert_equal_bits(networks(), [batch.select_rows(slice(16, 48))])


@pytest.mark.parametrize("options", [
    {}, {"policy_delay": 2}, {"target_update_interval": 2}, {"max_gradient_norm": 0.1},
])  # fmt: skip
def test_updates_have_the_same_bits_with_and_without_the_kernels(options, monkeypatch):
    settings, states = SacSettings(**options), []
    for threads in (1, 2, None):
        if threads is None:
            monkeypatch.setenv("RLFLAME_KERNELS", "off")
            load_kernels.cache_clear()
        sac = learner(settings, networks(), threads or 1)
        assert isinstance(sac._providers[0], CompiledSac) == (threads is not None)
        sac.update(owed(0, 70), 0.0)  # longer than the interval at which small moments become zero
        states.append({name: array.tobytes() for name, array in sac.get_state().items()})
    monkeypatch.undo()
    load_kernels.cache_clear()
    assert states[0] == states[1] == states[2]


def test_a_hidden_layer_of_one_unit_has_the_same_bits():
    assert_equal_bits(networks(hidden=(8, 1)), [minibatch(1)])


def test_critics_that_standardise_are_not_compiled():
    assert type(make_sac(networks(norm="batch"), ThreadPair(1))) is NumpySac


def test_kernels_with_other_results_are_not_used(monkeypatch):
    kernels = load_kernels()
    run_lanes = kernels.run_lanes

    def run_without_slopes(helper, name, lanes):
        if name != "sac_compute_action_slopes":
            run_lanes(helper, name, lanes)

    monkeypatch.setattr(kernels, "run_lanes", run_without_slopes)
    compiled_sac._has_equal_results.cache_clear()
    assert type(make_sac(networks(), ThreadPair(1))) is NumpySac
    compiled_sac._has_equal_results.cache_clear()


def test_an_array_that_the_kernels_cannot_read_is_refused():
    batch = minibatch(2)
    provider = make_sac(networks(), ThreadPair(1))
    wrong = dataclasses.replace(batch, observations=batch.observations.astype(np.float64))
    with pytest.raises(TypeError, match="float64"):
        provider.sample_actions(wrong)
