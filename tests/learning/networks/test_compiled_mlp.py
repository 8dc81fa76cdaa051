"""Compiled passes have the bits of `MLP`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from rlflame.learning.kernels.library import load_kernels
from rlflame.learning.networks import compiled_mlp
from rlflame.learning.networks.compiled_mlp import CompiledMLP, make_mlp
from rlflame.learning.networks.flat_vector import FlatVector
from rlflame.learning.networks.mlp import MLP

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="the kernels were not compiled")
SIZES = [(5, 16, 16, 3), (17, 64, 64, 1), (4, 32, 2), (3, 6), (1, 2, 1), (11, 64, 32, 16, 8, 2)]


def make_vector(sizes: tuple[int, ...], seed: int = 0) -> FlatVector:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        shapes |= {f"n.{layer}.weight": (fan_in, fan_out), f"n.{layer}.bias": (fan_out,)}
    vector = FlatVector(shapes)
    generator = np.random.default_rng(seed)
    vector.data[:] = generator.standard_normal(len(vector.data)) / np.sqrt(max(sizes))
    return vector


def compute_bytes(network: MLP, gradients: FlatVector, x, upstream) -> tuple[bytes, ...]:
    gradients.data[:] = 0.0
    out = network.forward(x).tobytes()
    network.backward(upstream)
    parts = gradients.data.tobytes()
    network.forward(x)
    return out, parts, network.compute_input_gradient(upstream, 0).tobytes()


def compare(sizes, tanh, x, upstream, vector=None) -> None:
    vector = vector or make_vector(sizes)
    gradients = FlatVector(vector.shapes)
    layers = len(sizes) - 1
    compiled = make_mlp(vector, gradients, "n", layers, tanh)
    assert isinstance(compiled, CompiledMLP)
    plain = MLP(vector, gradients, "n", layers, tanh)
    found = compute_bytes(compiled, gradients, x, upstream)
    assert found == compute_bytes(plain, gradients, x, upstream)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 63, 64, 65, 300])
@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_passes_have_the_same_bits(sizes, tanh, rows):
    generator = np.random.default_rng(rows)
    x = generator.standard_normal((rows, sizes[0]), dtype=np.float32)
    upstream = generator.standard_normal((sizes[-1], rows), dtype=np.float32)
    compare(sizes, tanh, x, upstream)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (17, 1, 1, 65, 6), (17, 64, 1, 2), (17, 64, 1)])
def test_a_hidden_layer_of_one_unit_is_not_compiled(sizes):
    """For such layers, numpy calls other functions of BLAS."""
    vector = make_vector(sizes)
    network = make_mlp(vector, FlatVector(vector.shapes), "n", len(sizes) - 1, tanh=False)
    assert isinstance(network, CompiledMLP) == (1 not in sizes[1:-1])


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, 1e30, 1e-42])
def test_passes_with_unusual_numbers_have_the_same_bits(value, tanh):
    sizes = (5, 16, 16, 3)
    generator = np.random.default_rng(1)
    x = generator.standard_normal((20, 5), dtype=np.float32)
    x[3] = value
    upstream = generator.standard_normal((3, 20), dtype=np.float32)
    upstream[:, 5] = value
    with np.errstate(all="ignore"):
        compare(sizes, tanh, x, upstream)


def test_upstream_may_have_any_layout():
    generator = np.random.default_rng(2)
    x = generator.standard_normal((9, 5), dtype=np.float32)
    compare((5, 16, 16, 3), True, x, generator.standard_normal((9, 3), dtype=np.float32).T)


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_an_upstream_that_the_kernels_cannot_read_is_left_to_numpy(change):
    sizes = (5, 16, 16, 3)
    vector, gradients = make_vector(sizes), FlatVector(make_vector(sizes).shapes)
    network = make_mlp(vector, gradients, "n", 3, True)
    network.forward(np.ones((9, 5), np.float32))
    upstream = np.ones((3, 9)) if change == "dtype" else np.ones((3, 4), np.float32)
    with pytest.raises((ValueError, TypeError)):
        network.backward(upstream)


def test_two_threads_may_compute_passes_at_the_same_time():
    sizes, rows = (17, 64, 64, 6), 256
    generator = np.random.default_rng(3)
    x = generator.standard_normal((rows, sizes[0]), dtype=np.float32)
    upstream = generator.standard_normal((sizes[-1], rows), dtype=np.float32)
    vector = make_vector(sizes)

    def compute(_: int) -> list[tuple[bytes, ...]]:
        gradients = FlatVector(vector.shapes)
        network = make_mlp(vector, gradients, "n", 3, True)
        return [compute_bytes(network, gradients, x, upstream) for _ in range(30)]

    with ThreadPoolExecutor(2) as threads:
        results = [item for items in threads.map(compute, range(2)) for item in items]
    assert len(results) == 60
    assert len(set(results)) == 1


@pytest.mark.parametrize("function", ["forward", "backward"])
def test_kernels_with_other_results_are_not_used(function, monkeypatch):
    kernels = load_kernels()
    assert kernels is not None
    sizes = (7, 12, 5)
    vector, gradients = make_vector(sizes), FlatVector(make_vector(sizes).shapes)
    compute = getattr(kernels, function)

    def compute_otherwise(network: int, *rest: int) -> None:
        compute(network, *rest)
        gradient = compiled_mlp.NetworkBuffers.from_address(network)
        address = gradient.out if function == "forward" else gradient.gradients[0]
        numbers = np.ctypeslib.as_array(compiled_mlp.ctypes.c_float.from_address(address))
        numbers[...] = np.nextafter(numbers, np.float32(9))

    monkeypatch.setattr(kernels, function, compute_otherwise)
    compiled_mlp._has_equal_results.cache_clear()
    assert type(make_mlp(vector, gradients, "n", 2, True)) is MLP
    compiled_mlp._has_equal_results.cache_clear()
