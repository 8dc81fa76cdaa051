"""A perceptron each of whose layers is given its inputs standardised over the batch.

Where it is learned, mean and variance are those of the batch, and the gradient goes through them;
where it is asked for values and their slopes, they are the means that followed those batches. There
is no scale and no shift after it: the layer that follows can have both. Laid out as in `kernel`.
Must not know: losses, optimisers, who follows whom.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlflame.rollout.spec import Array, Float32

from .flat_params import FlatVector, restore

#: Added to the variance that is divided by. An input that hardly ever moves is not blown up by more
#: than some thirty times.
BATCH_EPSILON = 1e-3
#: How far the moments move to those of the latest batch.
MOMENT_RATE = 0.01


def make_moment_shapes(prefix: str, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Mean and variance of what each layer is given."""
    return {
        f"{prefix}.{layer}.{name}": (size,)
        for layer, size in enumerate(sizes[:-1])
        for name in ("mean", "variance")
    }


class BatchMoments:
    """Those of the latest batch, and those in force outside of batches."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.latest, self.running = FlatVector(shapes), FlatVector(shapes)
        for name in shapes:
            self.running[name][:] = 1.0 if name.endswith("variance") else 0.0

    def sum_latest(self) -> float:
        """Not finite where one of the latest batch's is not."""
        return float(self.latest.data.sum(dtype=np.float64))

    def update_running(self) -> None:
        self.running.data += np.float32(MOMENT_RATE) * (self.latest.data - self.running.data)

    def get_state(self) -> dict[str, Array]:
        return {"moments": self.running.data.copy()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        restore(self.running.data, "moments", state)


class _Workspace:
    """Buffers for one number of rows."""

    def __init__(self, sizes: tuple[int, ...], rows: int, tanh: bool) -> None:
        def make_buffers(units: tuple[int, ...], dtype: type = np.float32) -> list[Array]:
            return [np.empty((n, rows), dtype) for n in units]

        self.inputs: list[Float32] = [np.ones((n + 1, rows), np.float32) for n in sizes[:-1]]
        self.units: list[Float32] = [x[:-1] for x in self.inputs]
        self.out: Float32 = np.empty((sizes[-1], rows), np.float32)
        #: By layer, of its inputs.
        self.scratch: list[Float32] = make_buffers(sizes[:-1])
        self.inverse: list[Float32] = [np.ones((n, 1), np.float32) for n in sizes[:-1]]
        hidden = sizes[1:-1]
        #: By hidden layer, of its units: what comes back to them, and the activation's slope.
        self.back: list[Float32] = make_buffers(hidden)
        self.slope: list[Float32] = make_buffers(hidden if tanh else ())
        self.active: list[NDArray[np.bool_]] = make_buffers(() if tanh else hidden, np.bool_)
        # numpy compares two arrays several times faster than an array and a number.
        self.zeros: Float32 = np.zeros(rows, np.float32)


class BatchNormMLP:
    """Forward and backward pass of one such network inside a flat parameter vector."""

    def __init__(
        self,
        parameters: FlatVector,
        gradients: FlatVector,
        moments: BatchMoments,
        prefix: str,
        layers: int,
        tanh: bool,
    ) -> None:
        self._blocks = [parameters.get_block(f"{prefix}.{layer}") for layer in range(layers)]
        self._gradients = [gradients.get_block(f"{prefix}.{layer}") for layer in range(layers)]
        self._sizes = (len(self._blocks[0]) - 1, *(block.shape[1] for block in self._blocks))
        self._tanh = tanh
        self._latest, self._running = (
            [
                (vector[f"{prefix}.{layer}.mean"], vector[f"{prefix}.{layer}.variance"])
                for layer in range(layers)
            ]
            for vector in (moments.latest, moments.running)
        )
        self._workspaces: dict[int, _Workspace] = {}
        self._workspace = self._make_workspace(0)

    def prepare_inputs(self, rows: int) -> Float32:
        """Where the next pass takes its inputs from, `[units, rows]`."""
        if rows not in self._workspaces:
            self._workspaces = {
                **dict(list(self._workspaces.items())[-1:]),
                rows: self._make_workspace(rows),
            }
        self._workspace = self._workspaces[rows]
        return self._workspace.units[0]

    def _make_workspace(self, rows: int) -> _Workspace:
        return _Workspace(self._sizes, rows, self._tanh)

    def run(self) -> Float32:
        """The outputs, with the moments in force."""
        for layer, (mean, variance) in enumerate(self._running):
            units, inverse = self._workspace.units[layer], self._workspace.inverse[layer]
            _invert_deviation(variance, inverse)
            units -= mean[:, None]
            units *= inverse
            self._forward_layer(layer)
        return self._workspace.out

    def run_batch(self) -> Float32:
        """The outputs, with the moments of this batch."""
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
        """Write the gradients of the latest `run_batch`, given d(loss)/d(output)."""
        space = self._workspace
        share = np.float32(1.0 / upstream.shape[1])
        for layer in range(len(self._blocks) - 1, -1, -1):
            np.dot(space.inputs[layer], upstream.T, out=self._gradients[layer])
            if layer == 0:
                return
            units, back, scratch = space.units[layer], space.back[layer - 1], space.scratch[layer]
            np.dot(self._blocks[layer][:-1], upstream, out=back)
            # What all rows have in common goes, and what lies along them.
            np.multiply(back, units, out=scratch)
            along = np.add.reduce(scratch, axis=1, keepdims=True)
            along *= share
            common = np.add.reduce(back, axis=1, keepdims=True)
            common *= share
            np.multiply(units, along, out=scratch)
            back -= common
            back -= scratch
            upstream = self._backward_layer(layer, back)

    def compute_input_gradient(self, upstream: Float32, first: int) -> Float32:
        """d(loss)/d(input) of the latest `run` for the inputs from `first` on."""
        space = self._workspace
        for layer in range(len(self._blocks) - 1, 0, -1):
            back = space.back[layer - 1]
            np.dot(self._blocks[layer][:-1], upstream, out=back)
            upstream = self._backward_layer(layer, back)
        below: Float32 = self._blocks[0][first:-1] @ upstream
        below *= space.inverse[0][first:]
        return below

    def _forward_layer(self, layer: int) -> None:
        """From a layer's standardised inputs to what the next one is given."""
        space = self._workspace
        last = layer == len(self._blocks) - 1
        out = space.out if last else space.units[layer + 1]
        np.dot(self._blocks[layer].T, space.inputs[layer], out=out)
        if last:
            return
        if self._tanh:
            slope = space.slope[layer]
            np.tanh(out, out=out)
            np.multiply(out, out, out=slope)
            np.subtract(np.float32(1.0), slope, out=slope)
        else:
            np.maximum(out, space.zeros, out=out)
            np.greater(out, space.zeros, out=space.active[layer])

    def _backward_layer(self, layer: int, back: Float32) -> Float32:
        """From d(loss)/d(standardised inputs) to that of what entered the activation below."""
        space = self._workspace
        back *= space.inverse[layer]
        back *= space.slope[layer - 1] if self._tanh else space.active[layer - 1]
        return back


def _invert_deviation(variance: Float32, inverse: Float32) -> None:
    np.add(variance[:, None], np.float32(BATCH_EPSILON), out=inverse)
    np.sqrt(inverse, out=inverse)
    np.divide(np.float32(1.0), inverse, out=inverse)
