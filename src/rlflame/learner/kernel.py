"""The gradient of a small perceptron with an action distribution on top, derived by hand in numpy.

At the minibatch sizes of CPU reinforcement learning an autograd framework spends most of its time
on dispatch; this does the same arithmetic in a few dozen calls without allocation. Checked
against torch autograd in the tests. Must not know: losses, optimisers, environments.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlflame.rollout.spec import Array, Float32

from .parameters import FlatVector

_LOG_TWO_PI = math.log(2.0 * math.pi)


class _Workspace:
    """Buffers for one number of rows."""

    def __init__(self, sizes: tuple[int, ...], rows: int) -> None:
        self.out: list[Float32] = [np.empty((rows, n), np.float32) for n in sizes[1:]]
        self.back: list[Float32] = [np.empty((rows, n), np.float32) for n in sizes[1:-1]]
        self.slope: list[Float32] = [np.empty((rows, n), np.float32) for n in sizes[1:-1]]
        self.ones: Float32 = np.ones(rows, np.float32)


class Perceptron:
    """Forward and backward pass of one network inside a flat parameter vector."""

    def __init__(
        self, parameters: FlatVector, gradients: FlatVector, prefix: str, layers: int, tanh: bool
    ) -> None:
        names = [f"{prefix}.{layer}" for layer in range(layers)]
        self._weights = [parameters[f"{name}.weight"] for name in names]
        self._biases = [parameters[f"{name}.bias"] for name in names]
        self._weight_gradients = [gradients[f"{name}.weight"] for name in names]
        self._bias_gradients = [gradients[f"{name}.bias"] for name in names]
        self._sizes = (self._weights[0].shape[0], *(w.shape[1] for w in self._weights))
        self._tanh = tanh
        self._spaces: dict[int, _Workspace] = {}
        self._input: Float32 = np.empty((0, 0), np.float32)
        self._space = _Workspace(self._sizes, 0)

    def forward(self, x: Float32) -> Float32:
        """The output for each row; its buffer is reused by the next pass of as many rows."""
        space = self._spaces.get(len(x))
        if space is None:
            space = self._spaces[len(x)] = _Workspace(self._sizes, len(x))
        self._space, self._input = space, x
        last = len(self._weights) - 1
        for layer, out in enumerate(space.out):
            np.matmul(x, self._weights[layer], out=out)
            np.add(out, self._biases[layer], out=out)
            if layer < last:
                if self._tanh:
                    np.tanh(out, out=out)
                else:
                    np.maximum(out, 0.0, out=out)
            x = out
        return x

    def backward(self, upstream: Float32) -> None:
        """Write the gradients of the latest forward pass, given d(loss)/d(output)."""
        space = self._space
        for layer in range(len(self._weights) - 1, -1, -1):
            below = space.out[layer - 1] if layer else self._input
            np.matmul(below.T, upstream, out=self._weight_gradients[layer])
            np.matmul(space.ones, upstream, out=self._bias_gradients[layer])
            if layer == 0:
                return
            back, slope = space.back[layer - 1], space.slope[layer - 1]
            np.matmul(upstream, self._weights[layer].T, out=back)
            if self._tanh:
                np.multiply(below, below, out=slope)
                np.subtract(1.0, slope, out=slope)
                np.multiply(back, slope, out=back)
            else:
                np.multiply(back, below > 0.0, out=back)
            upstream = back


class Head(Protocol):
    """An action distribution: log-density forward, and its gradient backward."""

    def log_prob(self, out: Float32, actions: Array) -> Float32: ...

    def entropy(self) -> Float32:
        """Of each row, for the outputs of the latest `log_prob`."""

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        """d(loss)/d(output), given d(loss)/d(log_prob) per row and a shared d(loss)/d(entropy)."""


class GaussianHead:
    """Independent normals with one learned log standard deviation per action."""

    def __init__(self, log_std: Float32, log_std_gradient: Float32) -> None:
        self._log_std = log_std
        self._gradient = log_std_gradient
        self._z: Float32 = np.empty((0, 0), np.float32)
        self._inverse: Float32 = np.empty(0, np.float32)

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        self._inverse = np.exp(-self._log_std)
        self._z = (actions - out) * self._inverse
        constant = float(self._log_std.sum()) + 0.5 * len(self._log_std) * _LOG_TWO_PI
        result: Float32 = np.einsum("ij,ij->i", self._z, self._z)
        result *= np.float32(-0.5)
        result -= np.float32(constant)
        return result

    def entropy(self) -> Float32:
        value = float(self._log_std.sum()) + 0.5 * len(self._log_std) * (1.0 + _LOG_TWO_PI)
        return np.full(len(self._z), value, np.float32)

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        weighted = self._z * d_log_prob[:, None]
        self._gradient[:] = np.einsum("ij,ij->j", weighted, self._z)
        self._gradient += np.float32(d_entropy * len(self._z)) - d_log_prob.sum()
        weighted *= self._inverse
        return weighted


class CategoricalHead:
    """A softmax over choices."""

    def __init__(self) -> None:
        self._log_softmax: Float32 = np.empty((0, 0), np.float32)
        self._softmax: Float32 = np.empty((0, 0), np.float32)
        self._actions: NDArray[np.int64] = np.empty(0, np.int64)
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        shifted = out - out.max(axis=1, keepdims=True)
        self._softmax = np.exp(shifted)
        total = self._softmax.sum(axis=1, keepdims=True)
        self._softmax /= total
        self._log_softmax = shifted - np.log(total)
        self._actions = actions
        if len(self._rows) != len(actions):
            self._rows = np.arange(len(actions))
        result: Float32 = self._log_softmax[self._rows, actions]
        return result

    def entropy(self) -> Float32:
        result: Float32 = -np.einsum("ij,ij->i", self._softmax, self._log_softmax)
        return result

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        result = self._softmax * -d_log_prob[:, None]
        result[self._rows, self._actions] += d_log_prob
        if d_entropy:
            spread = self._log_softmax + self.entropy()[:, None]
            result -= np.float32(d_entropy) * self._softmax * spread
        return result


def make_head(parameters: FlatVector, gradients: FlatVector) -> Head:
    """The distribution that the actor's parameters imply."""
    if "actor.log_std" in parameters.shapes:
        return GaussianHead(parameters["actor.log_std"], gradients["actor.log_std"])
    return CategoricalHead()
