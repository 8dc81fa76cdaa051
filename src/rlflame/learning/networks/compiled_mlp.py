"""Multilayer perceptrons whose passes are single calls of compiled code.

The results are bit-identical to those of `MLP`. This depends on how numpy's `np.dot` calls BLAS, so
`make_mlp` compares the results for each size of network before it uses the kernels.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math

import numpy as np

from rlflame.rollout.task import Float32

from ..kernels.library import (
    MAX_LAYERS,
    Kernels,
    NetworkBuffers,
    get_address,
    load_kernels,
    make_check_numbers,
)
from ..parallel.thread_pair import ThreadPair
from .flat_vector import FlatVector
from .mlp import MLP, Workspace

#: The numbers of rows for which results are compared.
_CHECK_ROWS = 2, 7, 64, 256


class CompiledWorkspace(Workspace):
    """Buffers, with their addresses in structures that the kernels read: one for each shard."""

    networks: list[NetworkBuffers]
    addresses: list[int]
    #: As many zeros as the largest hidden layer has outputs.
    all_zeros: Float32

    @property
    def address(self) -> int:
        """The address of the structure of the only shard."""
        (address,) = self.addresses
        return address


class CompiledMLP(MLP):
    """A multilayer perceptron whose forward and backward passes are compiled."""

    def __init__(
        self,
        parameters: FlatVector,
        gradients: FlatVector,
        prefix: str,
        layers: int,
        tanh: bool,
        kernels: Kernels,
    ) -> None:
        self.kernels = kernels
        super().__init__(parameters, gradients, prefix, layers, tanh)

    def run(self) -> Float32:
        space = self._workspace
        if not isinstance(space, CompiledWorkspace):
            return super().run()
        for address in space.addresses:
            self.kernels.forward(address, None)
        return space.out

    def backward(self, upstream: Float32) -> None:
        space = self._workspace
        if isinstance(space, CompiledWorkspace) and _is_readable(upstream, space.out.shape):
            start, step = get_address(upstream), upstream.nbytes // len(space.addresses)
            for number, address in enumerate(space.addresses):
                self.kernels.backward(address, start + number * step)
        else:
            super().backward(upstream)

    def backward_in_threads(
        self, thread_pair: ThreadPair, upstream: Float32, latent_gradient: Float32 | None
    ) -> None:
        space = self._workspace
        if (
            latent_gradient is None
            and isinstance(space, CompiledWorkspace)
            and _is_readable(upstream, space.out.shape)
        ):
            self.kernels.backward_with_helper(
                thread_pair.helper, space.address, get_address(upstream)
            )
        else:
            super().backward_in_threads(thread_pair, upstream, latent_gradient)

    def _backward_layer(
        self, layer: int, upstream: Float32, latent_gradient: Float32 | None = None
    ) -> Float32:
        space = self._workspace
        if (
            self._leading
            or latent_gradient is not None
            or not isinstance(space, CompiledWorkspace)
            or not _is_readable(upstream, (self._sizes[layer + 1], space.out.shape[-1]))
        ):
            return super()._backward_layer(layer, upstream, latent_gradient)
        self.kernels.backward_layer(space.address, layer, get_address(upstream))
        return space.deltas[layer - 1]

    def _make_workspace(self, rows: int) -> Workspace:
        # With a single row, np.dot calls other functions of BLAS.
        if rows < min(_CHECK_ROWS):
            return super()._make_workspace(rows)
        space = CompiledWorkspace(self._sizes, self._leading, rows, standardise=False)
        space.all_zeros = np.zeros(rows * max(self._sizes[1:-1], default=0), np.float32)
        shards = [*np.ndindex(self._leading)]
        space.networks = [self._describe_shard(space, shard) for shard in shards]
        space.addresses = [ctypes.addressof(network) for network in space.networks]
        return space

    def _describe_shard(self, space: CompiledWorkspace, shard: tuple[int, ...]) -> NetworkBuffers:
        """Return the addresses of the buffers and gradients of one shard."""
        network = NetworkBuffers(
            layers=len(self._blocks),
            rows=space.out.shape[-1],
            tanh=self._tanh,
            out=get_address(space.out[shard]),
            zeros=get_address(space.all_zeros),
        )
        network.sizes[: len(self._sizes)] = self._sizes
        network.weights[: len(self._blocks)] = [get_address(block) for block in self._blocks]
        for target, arrays in (
            (network.gradients, self._gradients),
            (network.inputs, space.inputs),
            (network.deltas, space.deltas),
        ):
            target[: len(arrays)] = [get_address(array[shard]) for array in arrays]
        return network


def _is_readable(array: Float32, shape: tuple[int, ...]) -> bool:
    """Return whether the kernels can read an array; numpy handles all others."""
    return array.dtype == np.float32 and array.shape == shape and array.flags.c_contiguous


def make_mlp(
    parameters: FlatVector, gradients: FlatVector, prefix: str, layers: int, tanh: bool
) -> MLP:
    """Make a network that uses the kernels if they can compute its passes."""
    kernels = load_kernels()
    blocks = [parameters.get_block(f"{prefix}.{layer}") for layer in range(layers)]
    sizes = (len(blocks[0]) - 1, *(block.shape[-1] for block in blocks))
    if kernels is None or not _has_equal_results(sizes, tanh):
        return MLP(parameters, gradients, prefix, layers, tanh)
    return CompiledMLP(parameters, gradients, prefix, layers, tanh, kernels)


@functools.cache
def _has_equal_results(sizes: tuple[int, ...], tanh: bool) -> bool:
    """Return whether the kernels and numpy compute the same bits for varied numbers."""
    kernels, layers = load_kernels(), len(sizes) - 1
    # With a hidden layer of one unit, np.dot calls other functions of BLAS.
    if kernels is None or layers > MAX_LAYERS or 1 in sizes[1:-1]:
        return False
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        shapes |= {f"n.{layer}.weight": (fan_in, fan_out), f"n.{layer}.bias": (fan_out,)}
    parameters, gradients = FlatVector(shapes), FlatVector(shapes)
    scale = np.float32(1.0 / math.sqrt(max(sizes)))
    parameters.data[:] = scale * make_check_numbers(0, len(parameters.data))
    for layer in range(layers):
        parameters[f"n.{layer}.bias"][:] = np.abs(parameters[f"n.{layer}.bias"])  # so no unit is 0
    passes = (
        MLP(parameters, gradients, "n", layers, tanh),
        CompiledMLP(parameters, gradients, "n", layers, tanh, kernels),
    )
    for rows in _CHECK_ROWS:
        x = make_check_numbers(1, rows, sizes[0])
        upstream = make_check_numbers(2, sizes[-1], rows)
        results = []
        for network in passes:
            gradients.data[:] = 0.0
            out = network.forward(x).tobytes()
            network.backward(upstream)
            results.append((out, gradients.data.tobytes()))
        if results[0] != results[1]:
            return False
    return True
