"""The flat vector and the initialisation of networks, compared with torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from batches import policy_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflame.config.recipe import NetworkSettings
from rlflame.learning.networks.flat_vector import FlatVector, build_network, init_network
from rlflame.rollout.policy import make_network_shapes


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


@settings(max_examples=30, deadline=None, derandomize=True)
@given(fan_in=st.integers(1, 40), fan_out=st.integers(1, 40), seed=st.integers(0, 99))
def test_orthogonal_initialisation_keeps_lengths(fan_in, fan_out, seed):
    vector = FlatVector(make_network_shapes("n", (fan_in, fan_out, 3)))
    vector.data[:] = 9.0
    orthogonal = NetworkSettings(orthogonal_init=True)
    init_network(vector, "n", 2, orthogonal, seed=seed, last_gain=0.5, key=0)

    singular = np.linalg.svd(vector["n.0.weight"], compute_uv=False)
    np.testing.assert_allclose(singular, math.sqrt(2.0), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.svd(vector["n.1.weight"], compute_uv=False), 0.5, 1e-5)
    assert not vector["n.0.bias"].any()
    assert not vector["n.1.bias"].any()


def test_orthogonal_matrices_are_spread_over_all_directions():
    """Without QR's sign correction, the diagonal's entries would have one sign."""
    signs = []
    for seed in range(40):
        vector = FlatVector(make_network_shapes("n", (6, 6)))
        orthogonal = NetworkSettings(orthogonal_init=True)
        init_network(vector, "n", 1, orthogonal, seed=seed, last_gain=1.0, key=0)
        signs.extend(np.sign(np.diagonal(vector["n.0.weight"])))
    assert abs(np.mean(signs)) < 0.25


def test_uniform_initialisation_is_that_of_torchs_linear_layer():
    vector = FlatVector(make_network_shapes("n", (100, 400, 10)))
    uniform = NetworkSettings(orthogonal_init=False)
    init_network(vector, "n", 2, uniform, seed=0, last_gain=0.1, key=0)
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
    """Each layer of each network has its own random stream, keyed by seed and place."""

    def built(seed=0, hidden=(8, 8), critic=True):
        spec = policy_spec("continuous", observations=8, actions=8, hidden=hidden)
        return build_network(spec, NetworkSettings(), seed, critic=critic)

    first = built()
    np.testing.assert_array_equal(first.data, built().data)
    square = [first[f"{net}.{layer}.weight"] for net in ("actor", "critic") for layer in (0, 1)]
    square.append(built(seed=1)["actor.0.weight"])
    for i, one in enumerate(square):
        for other in square[:i]:
            assert np.abs(one - other).max() > 0.1
    # A critic, or another width of a later layer, does not change the actor's first layer.
    for other in (built(critic=False), built(hidden=(8, 5))):
        np.testing.assert_array_equal(other["actor.0.weight"], first["actor.0.weight"])


def test_a_new_actor_is_indifferent_and_its_critic_is_not():
    spec = policy_spec("continuous", hidden=(16,))
    settings_ = NetworkSettings(last_layer_scale=0.01, log_std_init=-0.7)
    vector = build_network(spec, settings_, 0, critic=True)

    def sizes(name):
        return np.linalg.svd(vector[name], compute_uv=False)

    np.testing.assert_allclose(sizes("actor.0.weight"), math.sqrt(2.0), rtol=1e-5)
    np.testing.assert_allclose(sizes("actor.1.weight"), 0.01, rtol=1e-5)
    np.testing.assert_allclose(sizes("critic.1.weight"), 1.0, rtol=1e-5)
    np.testing.assert_allclose(vector["actor.log_std"], -0.7, rtol=1e-6)
