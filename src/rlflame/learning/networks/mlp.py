"""Small multilayer perceptrons in numpy with hand-derived gradients.

At the minibatch sizes that are common for reinforcement learning on a CPU, an autograd framework
spends most of its time on dispatch. This module does the same arithmetic in a few dozen calls that
allocate little. Arrays have the layout `[units, rows]`. A layer's input ends with a row of ones,
which multiplies the row of biases below the weights. The forward pass of a layer is therefore one
matrix product, and the gradient of its parameters is another. All other operations run over
contiguous memory. The tests compare the gradients with those of torch.

For small minibatches, call overhead dominates, so the code uses the fastest calls: `np.dot` instead
of `np.matmul`, 0-d arrays instead of Python numbers, and `np.add.reduce` instead of `sum`. The
results are bit-identical. Views are created only once, because creating one takes as long as a call
on a small array.

A network whose gradients have a leading axis processes several shards of equal size in one pass,
laid out `[shards, units, rows]`. The results are bit-identical to those of separate passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rlflame.rollout.task import Float32

from ..parallel.thread_pair import ThreadPair
from .flat_vector import FlatVector

#: Large batches are processed in chunks of this many rows, so that activations stay in the cache.
CHUNK_ROWS = 1024
_FLOAT_ONE = np.array(1.0, np.float32)
_MAX_WORKSPACES = 8
#: Added to the variance, so that a nearly constant input is amplified at most about 30 times.
BATCH_EPSILON = 1e-3
#: The fraction by which the running moments move towards those of the latest batch.
MOMENT_RATE = 0.01


class Workspace:
    """Preallocated buffers and their views for a fixed number of rows."""

    def __init__(
        self, sizes: tuple[int, ...], leading: tuple[int, ...], rows: int, standardise: bool
    ) -> None:
        self.inputs: list[Float32] = [
            np.ones((*leading, n + 1, rows), np.float32) for n in sizes[:-1]
        ]
        self.units: list[Float32] = [x[..., :-1, :] for x in self.inputs]
        self.out: Float32 = np.empty((*leading, sizes[-1], rows), np.float32)
        hidden = sizes[1:-1]
        #: For each hidden layer: d(loss)/d(units), and the derivative of the activation.
        self.deltas: list[Float32] = [np.empty((*leading, n, rows), np.float32) for n in hidden]
        self.delta_rows: list[Float32] = [delta.mT for delta in self.deltas]
        self.slope: list[Float32] = [np.empty_like(delta) for delta in self.deltas]
        self.active = [np.empty((*leading, n, rows), np.bool_) for n in hidden]
        # numpy compares two arrays several times faster than an array and a number.
        self.zeros: Float32 = np.zeros(rows, np.float32)
        #: For each layer: buffers for the standardisation of its inputs.
        self.scratch: list[Float32] = [np.empty_like(x) for x in self.units if standardise]
        self.inverse: list[Float32] = [np.ones((n, 1), np.float32) for n in sizes[:-1]]


class MLP:
    """The forward and backward passes of a network stored in a flat vector."""

    _standardises = False

    def __init__(
        self, parameters: FlatVector, gradients: FlatVector, prefix: str, layers: int, tanh: bool
    ) -> None:
        self._blocks = [parameters.get_block(f"{prefix}.{layer}") for layer in range(layers)]
        self._gradients = [gradients.get_block(f"{prefix}.{layer}") for layer in range(layers)]
        self._weights = [block[:-1] for block in self._blocks]
        self._forwards = [block.T for block in self._blocks]
        self._hidden = layers - 1
        self._sizes = (len(self._weights[0]), *(block.shape[1] for block in self._blocks))
        self._tanh = tanh
        self._leading = gradients.leading
        self._multiply = np.matmul if self._leading else np.dot
        self._workspaces: dict[int, Workspace] = {}
        self._workspace = self._make_workspace(0)

    def prepare_inputs(self, rows: int) -> Float32:
        """Return the input buffer for the next pass, `[units, rows]`."""
        return self.prepare_workspace(rows).units[0]

    def prepare_workspace(self, rows: int) -> Workspace:
        """Return the buffers for the next pass."""
        space = self._workspaces.get(rows)
        if space is None:
            # The last minibatch of a batch can have any size, so keep only a few workspaces.
            if len(self._workspaces) >= _MAX_WORKSPACES:
                del self._workspaces[next(iter(self._workspaces))]
            space = self._workspaces[rows] = self._make_workspace(rows)
        self._workspace = space
        return space

    def _make_workspace(self, rows: int) -> Workspace:
        return Workspace(self._sizes, self._leading, rows, self._standardises)

    def forward(self, x: Float32) -> Float32:
        """Return the outputs `[units, rows]` for the rows of `x`; valid until the next pass."""
        np.copyto(self.prepare_inputs(x.shape[-2]), x.mT)
        return self.run()

    def run(self) -> Float32:
        """Return the outputs for the inputs in the buffer from `prepare_inputs`."""
        space = self._workspace
        for layer in range(self._hidden):
            units = space.units[layer + 1]
            self._multiply(self._forwards[layer], space.inputs[layer], out=units)
            if self._tanh:
                np.tanh(units, out=units)
            else:
                np.maximum(units, space.zeros, out=units)
        return self._multiply(self._forwards[-1], space.inputs[-1], out=space.out)

    def get_latent(self) -> Float32:
        """Return the last layer's inputs in the latest pass, `[units, rows]`."""
        return self._workspace.units[-1]

    def backward(self, upstream: Float32) -> None:
        """Write the parameter gradients, given d(loss)/d(output) of the latest pass."""
        space, by_rows = self._workspace, upstream.mT
        for layer in range(self._hidden, 0, -1):
            self._multiply(space.inputs[layer], by_rows, out=self._gradients[layer])
            upstream = self._backward_layer(layer, upstream)
            by_rows = space.delta_rows[layer - 1]
        self._multiply(space.inputs[0], by_rows, out=self._gradients[0])

    def backward_in_threads(
        self, thread_pair: ThreadPair, upstream: Float32, latent_gradient: Float32 | None
    ) -> None:
        """Write the same gradients as `backward`, using a thread pair.

        Below the last layer, the gradient of a layer's inputs and the gradient of its weights are
        computed in parallel. `latent_gradient` is the part of d(loss)/d(latent) that does not pass
        through the output, if any.
        """
        space, top = self._workspace, self._hidden
        np.dot(space.inputs[top], upstream.T, out=self._gradients[top])
        if top == 0:
            return
        self._backward_layer(top, upstream, latent_gradient)
        for layer in range(top - 1, 0, -1):

            def run_lane(number: int, layer: int = layer) -> None:
                if number == 0:
                    self._backward_layer(layer, space.deltas[layer])
                else:
                    np.dot(space.inputs[layer], space.delta_rows[layer], out=self._gradients[layer])

            thread_pair.run(run_lane)
        np.dot(space.inputs[0], space.delta_rows[0], out=self._gradients[0])

    def compute_input_gradient(self, upstream: Float32, first: int) -> Float32:
        """Return d(loss)/d(input) for the inputs from `first` on; write no gradients."""
        for layer in range(self._hidden, 0, -1):
            upstream = self._backward_layer(layer, upstream)
        return self._weights[0][first:] @ upstream

    def _backward_layer(
        self, layer: int, upstream: Float32, latent_gradient: Float32 | None = None
    ) -> Float32:
        """Return d(loss)/d(input of the activation below `layer`), given `upstream`."""
        space = self._workspace
        units, delta = space.units[layer], space.deltas[layer - 1]
        if self._leading and upstream.shape[-2] == 1:
            # If the inner dimension is 1, matmul does not call BLAS and is slow.
            for part, out in zip(upstream, delta, strict=True):
                np.dot(self._weights[layer], part, out=out)
        else:
            self._multiply(self._weights[layer], upstream, out=delta)
        if latent_gradient is not None:
            delta += latent_gradient
        if self._tanh:
            slope = space.slope[layer - 1]
            np.multiply(units, units, out=slope)
            np.subtract(_FLOAT_ONE, slope, out=slope)
            np.multiply(delta, slope, out=delta)
        else:
            active = space.active[layer - 1]
            np.greater(units, space.zeros, out=active)
            np.multiply(delta, active, out=delta)
        return delta


#: Makes a network from parameters, gradients, a prefix, a number of layers, and the use of tanh.
MakeNetwork = Callable[[FlatVector, FlatVector, str, int, bool], MLP]


def make_moment_shapes(prefix: str, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the mean and variance of each layer's inputs."""
    return {
        f"{prefix}.{layer}.{name}": (size,)
        for layer, size in enumerate(sizes[:-1])
        for name in ("mean", "variance")
    }


class BatchMoments:
    """The moments of the latest batch, and running moments over all batches."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.latest, self.running = FlatVector(shapes), FlatVector(shapes)
        for name in shapes:
            self.running[name][:] = 1.0 if name.endswith("variance") else 0.0

    def sum_latest(self) -> float:
        """Return the sum of the latest moments, which is not finite if any moment is not."""
        return float(self.latest.data.sum(dtype=np.float64))

    def update_running(self) -> None:
        self.running.data += np.float32(MOMENT_RATE) * (self.latest.data - self.running.data)


class BatchNormMLP(MLP):
    """A perceptron that standardises the inputs of each layer over the batch.

    `run_batch` uses the mean and variance of the batch, and gradients flow through them. `run` uses
    running moments of earlier batches. There is no learned scale or shift, because the layer's own
    weights and biases can represent both.
    """

    _standardises = True

    def __init__(
        self,
        parameters: FlatVector,
        gradients: FlatVector,
        moments: BatchMoments,
        prefix: str,
        layers: int,
        tanh: bool,
    ) -> None:
        super().__init__(parameters, gradients, prefix, layers, tanh)
        names = [f"{prefix}.{layer}." for layer in range(layers)]
        self._latest, self._running = (
            [(vector[name + "mean"], vector[name + "variance"]) for name in names]
            for vector in (moments.latest, moments.running)
        )

    def run(self) -> Float32:
        """Return the outputs, using the running moments."""
        for layer, (mean, variance) in enumerate(self._running):
            units, inverse = self._workspace.units[layer], self._workspace.inverse[layer]
            _invert_deviation(variance, inverse)
            units -= mean[:, None]
            units *= inverse
            self._forward_layer(layer)
        return self._workspace.out

    def run_batch(self) -> Float32:
        """Return the outputs, using the moments of this batch."""
        space = self._workspace
        share = np.float32(1.0 / space.out.shape[1])
        for layer, (mean, variance) in enumerate(self._latest):
            units, squares = space.units[layer], space.scratch[layer]
            np.add.reduce(units, axis=1, out=mean)
            mean *= share
            units -= mean[:, None]
            np.multiply(units, units, out=squares)
            np.add.reduce(squares, axis=1, out=variance)
            variance *= share
            _invert_deviation(variance, space.inverse[layer])
            units *= space.inverse[layer]
            self._forward_layer(layer)
        return space.out

    def backward(self, upstream: Float32) -> None:
        """Write the parameter gradients, given d(loss)/d(output) of `run_batch`."""
        space = self._workspace
        share = np.float32(1.0 / upstream.shape[1])
        for layer in range(self._hidden, -1, -1):
            np.dot(space.inputs[layer], upstream.T, out=self._gradients[layer])
            if layer == 0:
                return
            units, scratch = space.units[layer], space.scratch[layer]
            delta = space.deltas[layer - 1]
            np.dot(self._weights[layer], upstream, out=delta)
            # The gradient of standardisation: remove the mean and the component along the units.
            np.multiply(delta, units, out=scratch)
            cosine = np.add.reduce(scratch, axis=1, keepdims=True)
            cosine *= share
            common = np.add.reduce(delta, axis=1, keepdims=True)
            common *= share
            np.multiply(units, cosine, out=scratch)
            delta -= common
            delta -= scratch
            upstream = self._apply_slope(layer, delta)

    def compute_input_gradient(self, upstream: Float32, first: int) -> Float32:
        """Return d(loss)/d(input) for the inputs from `first` on, after `run`."""
        gradient = super().compute_input_gradient(upstream, first)
        gradient *= self._workspace.inverse[0][first:]
        return gradient

    def _forward_layer(self, layer: int) -> None:
        """Compute a layer's outputs, after any activation, from its standardised inputs."""
        space = self._workspace
        last = layer == self._hidden
        out = space.out if last else space.units[layer + 1]
        np.dot(self._forwards[layer], space.inputs[layer], out=out)
        if last:
            return
        if self._tanh:
            slope = space.slope[layer]
            np.tanh(out, out=out)
            np.multiply(out, out, out=slope)
            np.subtract(_FLOAT_ONE, slope, out=slope)
        else:
            np.maximum(out, space.zeros, out=out)
            np.greater(out, space.zeros, out=space.active[layer])

    def _backward_layer(
        self, layer: int, upstream: Float32, latent_gradient: Float32 | None = None
    ) -> Float32:
        assert latent_gradient is None
        delta = self._workspace.deltas[layer - 1]
        np.dot(self._weights[layer], upstream, out=delta)
        return self._apply_slope(layer, delta)

    def _apply_slope(self, layer: int, delta: Float32) -> Float32:
        """Convert d(loss)/d(standardised inputs) to d(loss)/d(input of the activation)."""
        space = self._workspace
        delta *= space.inverse[layer]
        delta *= space.slope[layer - 1] if self._tanh else space.active[layer - 1]
        return delta


def _invert_deviation(variance: Float32, inverse: Float32) -> None:
    np.add(variance[:, None], np.float32(BATCH_EPSILON), out=inverse)
    np.sqrt(inverse, out=inverse)
    np.divide(_FLOAT_ONE, inverse, out=inverse)
