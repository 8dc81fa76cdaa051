"""The compiled loss of PPO has the bits of `NumpyPpo`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from batches import floats, policy_spec, random_actions, random_network

from rlflame.learning.kernels.library import load_kernels
from rlflame.learning.parallel.process_group import Shards
from rlflame.learning.ppo import compiled_loss
from rlflame.learning.ppo.compiled_loss import CompiledPpo, make_ppo
from rlflame.learning.ppo.loss import NumpyPpo, PpoMinibatch

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="the kernels were not compiled")

KINDS = "continuous", "discrete"
#: The fields of a minibatch that contain any numbers, apart from actions.
FIELDS = "observations", "advantages", "returns", "log_probs"


def make_minibatch(rng, spec, rows: int, **changes) -> PpoMinibatch:
    batch = PpoMinibatch(
        observations=floats(rng, rows, spec.observation_size),
        actions=random_actions(rng, spec, rows),
        log_probs=floats(rng, rows) - 1.5 * spec.action_size,
        advantages=floats(rng, rows),
        returns=floats(rng, rows),
        old_values=floats(rng, rows),
        clip_range=0.2,
        clip_range_value=None,
        value_weight=0.25,
        entropy_weight=0.0,
    )
    return dataclasses.replace(batch, **changes)


def assert_equal_bits(spec, batch, count, names=("actor", "critic")):
    _, vector = random_network(np.random.default_rng(0), spec)
    compiled, plain = make_ppo(vector, spec), NumpyPpo(vector, spec)
    assert isinstance(compiled, CompiledPpo)
    with np.errstate(all="ignore"):
        gradients, sums = [], []
        for provider in (compiled, plain):
            gradient, values = provider.compute_gradient(batch, count, names)
            spans = [vector.find_span(f"{name}.") for name in names]
            gradients.append([gradient[span].tobytes() for span in spans])
            sums.append(repr(values))
    assert gradients[0] == gradients[1]
    assert sums[0] == sums[1]


@pytest.mark.parametrize("rows", [1, 2, 5, 33, 64, 500])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("actions", [1, 3, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_same_bits(kind, actions, activation, rows):
    rng = np.random.default_rng(rows)
    spec = policy_spec(kind, actions=actions, activation=activation, hidden=(16, 24))
    assert_equal_bits(spec, make_minibatch(rng, spec, rows), rows + 3)


@pytest.mark.parametrize("names", [("actor",), ("critic",), ("actor", "critic")])
@pytest.mark.parametrize("options", [
    {"clip_range_value": 0.1}, {"entropy_weight": 0.05}, {"clip_range": 0.0},
    {"clip_range": 0.5, "value_weight": 1.0},
])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_options_have_the_same_bits(kind, options, names):
    rng, spec = np.random.default_rng(5), policy_spec(kind)
    assert_equal_bits(spec, make_minibatch(rng, spec, 40, **options), 40, names)


@pytest.mark.parametrize(("kind", "field"), [
    *(("continuous", name) for name in ("actions", *FIELDS)),
    *(("discrete", name) for name in FIELDS),
])  # fmt: skip
@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e38, -0.0])
def test_gradients_of_unusual_numbers_have_the_same_bits(kind, value, field):
    rng, spec = np.random.default_rng(6), policy_spec(kind)
    batch = make_minibatch(rng, spec, 20, clip_range_value=0.1)
    getattr(batch, field)[3] = value
    assert_equal_bits(spec, batch, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_minibatch_with_nan_has_sums_that_are_not_finite(kind):
    rng, spec = np.random.default_rng(7), policy_spec(kind)
    _, vector = random_network(rng, spec)
    for field in FIELDS if kind == "discrete" else ("actions", *FIELDS):
        batch = make_minibatch(rng, spec, 20)
        getattr(batch, field)[3] = np.nan
        with np.errstate(all="ignore"):
            gradient, sums = make_ppo(vector, spec).compute_gradient(batch, 20)
        assert not np.isfinite([*sums.values(), np.dot(gradient, gradient)]).all(), field


@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_the_bits_of_one_pass_over_several_shards(kind):
    rng, spec = np.random.default_rng(8), policy_spec(kind)
    _, vector = random_network(rng, spec)
    batch = make_minibatch(rng, spec, 50)
    shards, names = Shards(4).split(50), ("actor", "critic")
    results = []
    for provider in (make_ppo(vector, spec), NumpyPpo(vector, spec)):
        parts = provider.compute_shards(batch, 50, names, shards)
        results.append([
            (gradient.tobytes(), sums)
            for gradients, all_sums in parts
            for gradient, sums in zip(gradients, all_sums, strict=True)
        ])  # fmt: skip
    assert len(results[0]) == 4
    assert results[0] == results[1]


def test_other_distributions_are_computed_in_numpy():
    masked = dataclasses.replace(policy_spec("discrete"), mask_size=3)
    several = dataclasses.replace(
        policy_spec(), action_kind="composite", action_counts=(3, 2), action_size=2
    )
    for spec in (policy_spec("gsde"), masked, several):
        _, vector = random_network(np.random.default_rng(0), spec)
        assert type(make_ppo(vector, spec)) is NumpyPpo


@pytest.mark.parametrize("value", [-1, 3])
def test_a_choice_out_of_range_is_refused(value):
    rng, spec = np.random.default_rng(9), policy_spec("discrete")
    _, vector = random_network(rng, spec)
    batch = make_minibatch(rng, spec, 20)
    batch.actions[7] = value
    with pytest.raises(IndexError, match="not between 0 and 2"):
        make_ppo(vector, spec).compute_gradient(batch, 20)


def test_arrays_that_the_kernels_cannot_read_are_refused():
    rng, spec = np.random.default_rng(9), policy_spec()
    _, vector = random_network(rng, spec)
    provider = make_ppo(vector, spec)
    for changes in (
        {"advantages": rng.standard_normal(20)},
        {"observations": floats(rng, 5, 20).T},
    ):
        with pytest.raises(TypeError, match="is not a contiguous float32 array"):
            provider.compute_gradient(make_minibatch(rng, spec, 20, **changes), 20)


def test_kernels_with_other_results_are_not_used(monkeypatch):
    kernels = load_kernels()
    spec = policy_spec(hidden=(9, 7))
    _, vector = random_network(np.random.default_rng(0), spec)
    compute = kernels.compute_value_gradient
    monkeypatch.setattr(
        kernels, "compute_value_gradient", lambda *given: compute(*given) * (1 + 1e-15)
    )
    compiled_loss._has_equal_results.cache_clear()
    assert type(make_ppo(vector, spec)) is NumpyPpo
    compiled_loss._has_equal_results.cache_clear()
