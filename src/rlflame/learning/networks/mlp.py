"""The gradient of a small perceptron with an action distribution on top, derived by hand in numpy.

At the minibatch sizes of CPU reinforcement learning an autograd framework spends most of its time
on dispatch; this does the same arithmetic in a few dozen calls that allocate little. Everything
in here is laid out `[units, rows]`: a layer's input ends in a row of ones, which meets the row of
biases below the weights, so that a layer is one product forward and its gradient another one, and
what follows runs over contiguous memory. Checked against torch autograd in the tests.

What a small minibatch costs is calls, not arithmetic, so they are the cheap ones: `np.dot` begins
sooner than `np.matmul`, an array without dimensions than a number, `np.add.reduce` than `sum`; the
bits are the same. A view costs as much as a small operation and is taken once.

Must not know: losses, optimisers, environments.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlflame.rollout.spec import Array, Float32

from ..parallel.thread_pair import ThreadPair
from .flat_params import FlatVector
from .gsde import GsdeHead, GsdeVariance

#: A long batch is worked off in pieces whose activations stay in a processor's cache.
CHUNK_ROWS = 1024
_LOG_TWO_PI = math.log(2.0 * math.pi)
_FLOAT_ONE, _MINUS_HALF = np.array(1.0, np.float32), np.array(-0.5, np.float32)
_MAX_WORKSPACES = 8


class _Workspace:
    """Buffers for one number of rows, and their views."""

    def __init__(self, sizes: tuple[int, ...], rows: int) -> None:
        def make_buffers(units: tuple[int, ...], dtype: type = np.float32) -> list[Array]:
            return [np.empty((n, rows), dtype) for n in units]

        self.inputs: list[Float32] = [np.ones((n + 1, rows), np.float32) for n in sizes[:-1]]
        self.units: list[Float32] = [x[:-1] for x in self.inputs]
        self.out: Float32 = np.empty((sizes[-1], rows), np.float32)
        hidden = sizes[1:-1]
        self.back: list[Float32] = make_buffers(hidden)
        self.back_by_rows: list[Float32] = [back.T for back in self.back]
        self.slope: list[Float32] = make_buffers(hidden)
        self.active: list[NDArray[np.bool_]] = make_buffers(hidden, np.bool_)
        # numpy compares two arrays several times faster than an array and a number.
        self.zeros: Float32 = np.zeros(rows, np.float32)


class MLP:
    """Forward and backward pass of one network inside a flat parameter vector."""

    def __init__(
        self,
        parameters: FlatVector,
        gradients: FlatVector,
        prefix: str,
        layers: int,
        tanh: bool,
    ) -> None:
        self._blocks = [parameters.get_block(f"{prefix}.{layer}") for layer in range(layers)]
        self._gradients = [gradients.get_block(f"{prefix}.{layer}") for layer in range(layers)]
        self._weights = [block[:-1] for block in self._blocks]
        self._forwards = [block.T for block in self._blocks]
        self._hidden = len(self._blocks) - 1
        self._sizes = (len(self._weights[0]), *(block.shape[1] for block in self._blocks))
        self._tanh = tanh
        self._workspaces: dict[int, _Workspace] = {}
        self._active_workspace = _Workspace(self._sizes, 0)

    def forward(self, x: Float32) -> Float32:
        """The outputs `[units, rows]` for the rows of `x`; the buffer is the next pass's too."""
        np.copyto(self.prepare_inputs(len(x)), x.T)
        return self.run()

    def prepare_inputs(self, rows: int) -> Float32:
        """Where the next pass takes its inputs from, `[units, rows]`."""
        self._active_workspace = self._get_workspace(rows)
        return self._active_workspace.units[0]

    def run(self) -> Float32:
        """The outputs for what was written into `prepare_inputs`."""
        space = self._active_workspace
        for layer in range(self._hidden):
            units = space.units[layer + 1]
            np.dot(self._forwards[layer], space.inputs[layer], out=units)
            if self._tanh:
                np.tanh(units, out=units)
            else:
                np.maximum(units, space.zeros, out=units)
        return np.dot(self._forwards[-1], space.inputs[-1], out=space.out)

    def get_latent(self) -> Float32:
        """What entered the last layer in the latest pass, `[units, rows]`."""
        return self._active_workspace.units[-1]

    def backward(self, upstream: Float32) -> None:
        """Write the gradients of the latest forward pass, given d(loss)/d(output)."""
        space, by_rows = self._active_workspace, upstream.T
        for layer in range(self._hidden, 0, -1):
            np.dot(space.inputs[layer], by_rows, out=self._gradients[layer])
            upstream = self._backward_layer(layer, upstream)
            by_rows = space.back_by_rows[layer - 1]
        np.dot(space.inputs[0], by_rows, out=self._gradients[0])

    def backward_in_threads(
        self, thread_pair: ThreadPair, upstream: Float32, latent_gradient: Float32 | None
    ) -> None:
        """The same: below the narrow last layer, while one lane goes down to the next layer, the
        other one has its weights.

        `beside` is d(loss)/d(latent) by other ways than the output, if there are any.
        """
        top = self._hidden
        np.dot(self._active_workspace.inputs[top], upstream.T, out=self._gradients[top])
        if top == 0:
            return
        upstream = self._backward_layer(top, upstream, latent_gradient)
        for layer in range(top - 1, 0, -1):
            below: list[Float32] = []

            def run_lane(
                number: int,
                layer: int = layer,
                upstream: Float32 = upstream,
                below: list[Float32] = below,
            ) -> None:
                if number == 0:
                    below.append(self._backward_layer(layer, upstream))
                else:
                    np.dot(
                        self._active_workspace.inputs[layer], upstream.T, out=self._gradients[layer]
                    )

            thread_pair.run(run_lane)
            (upstream,) = below
        np.dot(self._active_workspace.inputs[0], upstream.T, out=self._gradients[0])

    def compute_input_gradient(self, upstream: Float32, first: int) -> Float32:
        """d(loss)/d(input) for the inputs from `first` on; no weight's gradient is touched."""
        for layer in range(self._hidden, 0, -1):
            upstream = self._backward_layer(layer, upstream)
        return self._weights[0][first:] @ upstream

    def _backward_layer(
        self, layer: int, upstream: Float32, latent_gradient: Float32 | None = None
    ) -> Float32:
        """d(loss)/d(what enters the hidden layer's activation), given it for the layer's output."""
        space = self._active_workspace
        units, back = space.units[layer], space.back[layer - 1]
        np.dot(self._weights[layer], upstream, out=back)
        if latent_gradient is not None:
            back += latent_gradient
        if self._tanh:
            slope = space.slope[layer - 1]
            np.multiply(units, units, out=slope)
            np.subtract(_FLOAT_ONE, slope, out=slope)
            np.multiply(back, slope, out=back)
        else:
            active = space.active[layer - 1]
            np.greater(units, space.zeros, out=active)
            np.multiply(back, active, out=back)
        return back

    def _get_workspace(self, rows: int) -> _Workspace:
        """Few are kept: minibatches come in one size, but the ends of batches in any."""
        space = self._workspaces.get(rows)
        if space is None:
            if len(self._workspaces) >= _MAX_WORKSPACES:
                del self._workspaces[next(iter(self._workspaces))]
            space = self._workspaces[rows] = _Workspace(self._sizes, rows)
        return space


class Head(Protocol):
    """An action distribution: log-density forward, and its gradient backward."""

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        """Of each row's action, given the network's outputs `[units, rows]`."""

    def sum_entropy(self) -> float:
        """Summed over the rows of the latest `log_prob`."""

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        """d(loss)/d(output), given d(loss)/d(log_prob) per row and a shared d(loss)/d(entropy)."""


class GaussianHead:
    """Independent normals with one learned log standard deviation per action."""

    def __init__(self, log_std: Float32, log_std_gradient: Float32) -> None:
        self._log_std = log_std
        self._gradient = log_std_gradient
        self._z: Float32 = np.empty((len(log_std), 0), np.float32)
        self._squares = self._z
        self._inverse: Float32 = np.empty((len(log_std), 1), np.float32)
        #: Minus the log-density at the mean.
        self._log_volume = 0.0

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        total = float(np.add.reduce(self._log_std))
        self._log_volume = total + 0.5 * len(self._log_std) * _LOG_TWO_PI
        self._inverse = np.exp(-self._log_std)[:, None]
        z = actions.T - out
        z *= self._inverse
        self._z = z
        self._squares = z * z
        result: Float32 = np.add.reduce(self._squares, axis=0)
        result *= _MINUS_HALF
        result -= np.float32(self._log_volume)
        return result

    def sum_entropy(self) -> float:
        rows = self._z.shape[1]
        return float(rows * (self._log_volume + 0.5 * len(self._log_std)))

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        np.dot(self._squares, d_log_prob, out=self._gradient)
        self._gradient += np.float32(d_entropy * len(d_log_prob)) - np.add.reduce(d_log_prob)
        weighted = self._z * d_log_prob
        weighted *= self._inverse
        return weighted


class CategoricalHead:
    """A softmax over choices."""

    def __init__(self) -> None:
        self._log_softmax: Float32 = np.empty((0, 0), np.float32)
        self._softmax = self._log_softmax
        self._actions: NDArray[np.int64] = np.empty(0, np.int64)
        self._rows = self._actions

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        shifted = out - np.maximum.reduce(out, axis=0)
        self._softmax = np.exp(shifted)
        total = np.add.reduce(self._softmax, axis=0)
        self._softmax /= total
        shifted -= np.log(total)
        self._log_softmax = shifted
        self._actions = actions
        if len(self._rows) != len(actions):
            self._rows = np.arange(len(actions))
        result: Float32 = shifted[actions, self._rows]
        return result

    def sum_entropy(self) -> float:
        return -float(np.vdot(self._softmax, self._log_softmax))

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        result = self._softmax * -d_log_prob
        result[self._actions, self._rows] += d_log_prob
        if d_entropy:
            entropy_slope = self._softmax * self._log_softmax
            entropy_slope -= self._softmax * np.add.reduce(entropy_slope, axis=0)
            entropy_slope *= np.float32(d_entropy)
            result -= entropy_slope
        return result


def make_head(parameters: FlatVector, gradients: FlatVector, actor: MLP) -> Head:
    """The distribution that the actor's parameters imply."""
    if "actor.log_std" not in parameters.shapes:
        return CategoricalHead()
    log_std, gradient = parameters["actor.log_std"], gradients["actor.log_std"]
    if log_std.ndim == 2:
        return GsdeHead(GsdeVariance(actor.get_latent, log_std, gradient))
    return GaussianHead(log_std, gradient)
