"""The flat vector, its initialisation, clipping and Adam, against torch and linear algebra."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from batches import policy_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlflame.config.algorithms import PpoSettings, ReinforceSettings, SacSettings
from rlflame.config.recipe import NetworkSettings
from rlflame.errors import LearningError
from rlflame.learning.networks.flat_params import (
    Adam,
    FlatVector,
    clip_by_norm,
    initialise,
    make_network_shapes,
)
from rlflame.learning.networks.network_init import build_network


def test_views_share_the_vectors_memory():
    vector = FlatVector({"a": (2, 3), "b": (4,)})
    vector.data[:] = np.arange(10)

    assert vector["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    vector["b"][1] = -1.0
    assert vector.data.tolist() == [0, 1, 2, 3, 4, 5, 6, -1, 8, 9]
    copies = vector.copy_views("b")
    assert list(copies) == ["b"]
    copies["b"][:] = 0.0
    assert vector.data[7] == -1.0


def test_a_block_is_weights_above_biases():
    vector = FlatVector(make_network_shapes("net", (2, 3, 1)))
    vector.data[:] = np.arange(13)

    block = vector.get_block("net.0")
    np.testing.assert_array_equal(block[:-1], vector["net.0.weight"])
    np.testing.assert_array_equal(block[-1], vector["net.0.bias"])
    assert vector.get_block("net.1").ravel().tolist() == [9, 10, 11, 12]
    with pytest.raises(ValueError, match="do not follow"):
        FlatVector({"n.weight": (2, 2), "other": (1,), "n.bias": (2,)}).get_block("n")


@pytest.mark.parametrize("epsilon", [1e-8, 0.1])
def test_adam_is_torchs(epsilon):
    rng = np.random.default_rng(0)
    ours = rng.standard_normal(50).astype(np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(ours.copy()).double())
    adam = Adam(50, epsilon)
    optimizer = torch.optim.Adam([theirs], lr=1.0, eps=epsilon)
    for step in range(500):
        # Of every size, zeros and sudden changes included, with a rate that moves too.
        gradient = (rng.standard_normal(50) * 10.0 ** rng.integers(-6, 3)).astype(np.float32)
        gradient[:10] = 0.0
        rate = 1e-2 * (1.0 - step / 500)
        adam.step(ours, gradient, rate)
        theirs.grad = torch.from_numpy(gradient).double()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

    expected = theirs.detach().numpy()
    assert np.abs(expected[10:] - expected[10:].mean()).max() > 0.1
    np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize("settings", [PpoSettings, ReinforceSettings, SacSettings])
def test_the_least_epsilon_divides_no_gradient_of_0_by_nothing(settings):
    least = 1e-30
    adam, vector = Adam(2, least), np.ones(2, np.float32)
    for _ in range(3):
        adam.step(vector, np.array([1.0, 0.0], np.float32), 1e-3)
        assert np.isfinite(vector).all()
    assert settings(adam_epsilon=least).adam_epsilon == least
    with pytest.raises(ValidationError, match="adam_epsilon"):
        settings(adam_epsilon=1e-31)


def test_adam_goes_on_from_its_state():
    rng = np.random.default_rng(1)
    gradients = rng.standard_normal((20, 7)).astype(np.float32)
    straight, stopped = np.zeros(7, np.float32), np.zeros(7, np.float32)
    one, first, second = Adam(7, 1e-8), Adam(7, 1e-8), Adam(7, 1e-8)
    for gradient in gradients:
        one.step(straight, gradient, 1e-2)
    for gradient in gradients[:9]:
        first.step(stopped, gradient, 1e-2)
    second.load_state("adam", first.get_state("adam"))
    for gradient in gradients[9:]:
        second.step(stopped, gradient, 1e-2)

    np.testing.assert_array_equal(stopped, straight)


def test_moments_of_what_no_gradient_reaches_end_at_zero_and_weights_are_none_the_wiser():
    """Subnormal numbers are slow, and the smallest of them is 0.9 of itself."""
    rng = np.random.default_rng(3)
    weights, swept = rng.standard_normal(40).astype(np.float32), Adam(40, 1e-8)
    plain, first, second = weights.copy(), np.zeros(40, np.float32), np.zeros(40, np.float32)
    smallest = np.finfo(np.float32).smallest_normal
    for step in range(1, 80_001):
        gradient = np.zeros(40, np.float32)
        gradient[:20] = rng.standard_normal(20) * 10.0 ** rng.integers(-6, 3)
        if step < 40:
            gradient[20:] = 10.0 ** rng.integers(-12, 1, 20)
        swept.step(weights, gradient, 1e-3)
        first += np.float32(0.1) * (gradient - first)
        second += np.float32(0.001) * (gradient * gradient - second)
        correction = math.sqrt(1 - 0.999**step)
        rate = np.float32(1e-3 * correction / (1 - 0.9**step))
        plain -= rate * (first / (np.sqrt(second) + np.float32(1e-8 * correction)))
        for moment in (swept.first, swept.second):
            assert not np.any((moment != 0) & (np.abs(moment) < smallest)), step

    np.testing.assert_array_equal(weights, plain)
    assert np.all(swept.first[20:] == 0)
    assert np.all(swept.second[20:] == 0)
    assert 0 < np.abs(first[20:]).max() < smallest


@pytest.mark.parametrize(
    "change",
    [
        {"adam.first": np.zeros(1, np.float32)},
        {"adam.second": np.zeros(7, np.float64)},
        {"adam.count": np.zeros(1, np.int64)},
    ],
)
def test_a_state_that_does_not_fit_is_refused(change):
    adam = Adam(7, 1e-8)
    good = adam.get_state("adam")
    with pytest.raises(LearningError, match=next(iter(change)).replace(".", r"\.")):
        adam.load_state("adam", {**good, **change})
    del good["adam.second"]
    with pytest.raises(LearningError, match=r"adam\.second is missing"):
        adam.load_state("adam", good)


@pytest.mark.parametrize("size", [0.1, 3.0])
def test_clipping_is_torchs(size):
    gradient = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    gradient *= size / np.linalg.norm(gradient)
    parameter = torch.nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.from_numpy(gradient.copy())
    expected = torch.nn.utils.clip_grad_norm_([parameter], 0.5)

    norm = clip_by_norm(gradient, 0.5)

    assert norm == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(gradient, parameter.grad.numpy(), rtol=1e-5)
    assert np.linalg.norm(gradient) == pytest.approx(min(size, 0.5), rel=1e-4)


def test_without_a_bound_nothing_is_clipped():
    gradient = np.full(4, 100.0, np.float32)
    assert clip_by_norm(gradient, None) == 200.0
    assert gradient.tolist() == [100.0] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_norm_that_is_not_finite_is_told_and_nothing_scaled(bad):
    gradient = np.array([1.0, bad], np.float32)
    with np.errstate(over="ignore"):
        assert not math.isfinite(clip_by_norm(gradient, 0.5))
    assert gradient[0] == 1.0


@settings(max_examples=30, deadline=None, derandomize=True)
@given(fan_in=st.integers(1, 40), fan_out=st.integers(1, 40), seed=st.integers(0, 99))
def test_orthogonal_initialisation_keeps_lengths(fan_in, fan_out, seed):
    vector = FlatVector(make_network_shapes("n", (fan_in, fan_out, 3)))
    vector.data[:] = 9.0
    initialise(vector, "n", 2, seed=seed, orthogonal=True, hidden_gain=2.0, last_gain=0.5, key=0)

    singular = np.linalg.svd(vector["n.0.weight"], compute_uv=False)
    np.testing.assert_allclose(singular, 2.0, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.svd(vector["n.1.weight"], compute_uv=False), 0.5, 1e-5)
    assert not vector["n.0.bias"].any()
    assert not vector["n.1.bias"].any()


def test_orthogonal_matrices_are_spread_over_all_directions():
    """Without the sign correction of QR, the diagonal would have one sign."""
    signs = []
    for seed in range(40):
        vector = FlatVector(make_network_shapes("n", (6, 6)))
        initialise(
            vector, "n", 1, seed=seed, orthogonal=True, hidden_gain=1.0, last_gain=1.0, key=0
        )
        signs.extend(np.sign(np.diagonal(vector["n.0.weight"])))
    assert abs(np.mean(signs)) < 0.25


def test_uniform_initialisation_is_that_of_torchs_linear_layer():
    vector = FlatVector(make_network_shapes("n", (100, 400, 10)))
    initialise(vector, "n", 2, seed=0, orthogonal=False, hidden_gain=9.0, last_gain=0.1, key=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = torch.nn.Linear(100, 400)

    for name, like in (("weight", layer.weight), ("bias", layer.bias)):
        found = vector[f"n.0.{name}"]
        bound = 1.0 / math.sqrt(100)
        assert np.abs(found).max() <= bound
        assert np.abs(found).max() > 0.97 * bound
        assert found.std() == pytest.approx(float(like.detach().std()), rel=0.1)
        assert abs(found.mean()) < 0.01
        assert np.abs(vector[f"n.1.{name}"]).max() <= 0.1 / math.sqrt(400)


def test_initialisation_is_keyed():
    """Every layer of every network has a stream of its own, named by the seed and its place."""

    def built(seed=0, hidden=(8, 8), critic=True):
        spec = policy_spec("continuous", observations=8, actions=8, hidden=hidden)
        return build_network(spec, NetworkSettings(), seed, critic=critic)[1]

    first = built()
    np.testing.assert_array_equal(first.data, built().data)
    square = [first[f"{net}.{layer}.weight"] for net in ("actor", "critic") for layer in (0, 1)]
    square.append(built(seed=1)["actor.0.weight"])
    for i, one in enumerate(square):
        for other in square[:i]:
            assert np.abs(one - other).max() > 0.1
    # A critic, or another width further on, changes nothing about the actor's first layer.
    for other in (built(critic=False), built(hidden=(8, 5))):
        np.testing.assert_array_equal(other["actor.0.weight"], first["actor.0.weight"])


def test_a_new_actor_is_indifferent_and_its_critic_is_not():
    spec = policy_spec("continuous", hidden=(16,))
    settings_ = NetworkSettings(last_layer_scale=0.01, log_std_init=-0.7)
    _, vector = build_network(spec, settings_, 0, critic=True)

    def sizes(name):
        return np.linalg.svd(vector[name], compute_uv=False)

    np.testing.assert_allclose(sizes("actor.0.weight"), math.sqrt(2.0), rtol=1e-5)
    np.testing.assert_allclose(sizes("actor.1.weight"), 0.01, rtol=1e-5)
    np.testing.assert_allclose(sizes("critic.1.weight"), 1.0, rtol=1e-5)
    np.testing.assert_allclose(vector["actor.log_std"], -0.7, rtol=1e-6)
