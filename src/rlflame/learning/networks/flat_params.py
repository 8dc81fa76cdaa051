"""All weights as one flat float32 vector with named views, and what acts on it.

Must not know: which algorithm, where gradients come from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from rlflame.errors import LearningError
from rlflame.rollout.seeding import Role, make_stream
from rlflame.rollout.spec import Array, Float32

Shapes = Mapping[str, tuple[int, ...]]
_PIECE = 65_536
#: Beyond it a float does not know one count from the next.
_MOST_COUNTED = 2**53
_BETA_1, _BETA_2 = 0.9, 0.999
_TO_FIRST, _TO_SECOND = np.array(1 - _BETA_1, np.float32), np.array(1 - _BETA_2, np.float32)
#: Steps between two sweeps of moments below these, which move no weight any more. Not swept, those
#: of a unit that has fallen silent shrink until float32 has only subnormal numbers for them and
#: stay there: 0.9 of the smallest rounds to itself. Arithmetic on them takes some processors a
#: hundred times as long. Until the next sweep nothing that is left gets that small.
_SWEEP = 64
_STILL = np.array(1e-28, np.float32), np.array(1e-34, np.float32)


class FlatVector:
    """One contiguous vector; `self[name]` is a view into it."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = dict(shapes)
        self.data: Float32 = np.zeros(sum(map(math.prod, self.shapes.values())), np.float32)
        self._starts: dict[str, int] = {}
        self._views: dict[str, Float32] = {}
        start = 0
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            self._starts[name] = start
            self._views[name] = self.data[start:end].reshape(shape)
            start = end

    def __getitem__(self, name: str) -> Float32:
        return self._views[name]

    def get_block(self, layer: str) -> Float32:
        """One layer as it lies in memory, `[in + 1, out]`: its weights, and its biases below."""
        fan_in, fan_out = self.shapes[f"{layer}.weight"]
        start, bias = self._starts[f"{layer}.weight"], self._starts[f"{layer}.bias"]
        if bias != start + fan_in * fan_out:
            raise ValueError(f"the biases of {layer} do not follow its weights")
        return self.data[start : bias + fan_out].reshape(fan_in + 1, fan_out)

    def find_span(self, prefix: str) -> slice:
        """Where the views lie whose names begin with `prefix`; they must follow each other."""
        names = [name for name in self.shapes if name.startswith(prefix)]
        start, size = self._starts[names[0]], sum(math.prod(self.shapes[n]) for n in names)
        if self._starts[names[-1]] + math.prod(self.shapes[names[-1]]) != start + size:
            raise ValueError(f"the parts of {prefix} do not follow each other")
        return slice(start, start + size)

    def copy_views(self, prefix: str = "") -> dict[str, Array]:
        """Copies of the views whose names begin with `prefix`."""
        return {name: v.copy() for name, v in self._views.items() if name.startswith(prefix)}


def make_network_shapes(prefix: str, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Weights `[in, out]` of a plain multilayer perceptron, each followed by its biases."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        shapes[f"{prefix}.{layer}.weight"] = (fan_in, fan_out)
        shapes[f"{prefix}.{layer}.bias"] = (fan_out,)
    return shapes


def initialise(
    vector: FlatVector,
    prefix: str,
    layers: int,
    *,
    seed: int,
    orthogonal: bool,
    hidden_gain: float,
    last_gain: float,
    key: int,
) -> None:
    """Fill one network, each weight from its own stream.

    Orthogonal with zero biases, or uniform within 1/sqrt(fan_in) for weights and biases, which is
    the default of torch's linear layers.
    """
    for layer in range(layers):
        weight, bias = vector[f"{prefix}.{layer}.weight"], vector[f"{prefix}.{layer}.bias"]
        generator = make_stream(seed, Role.INITIALISE, key, layer)
        gain = last_gain if layer == layers - 1 else hidden_gain
        if orthogonal:
            weight[:] = gain * _sample_orthogonal(generator, *weight.shape)
            bias[:] = 0.0
        else:
            bound = 1.0 / math.sqrt(weight.shape[0])
            scale = last_gain if layer == layers - 1 else 1.0
            weight[:] = scale * generator.uniform(-bound, bound, weight.shape)
            bias[:] = scale * generator.uniform(-bound, bound, bias.shape)


def _sample_orthogonal(generator: np.random.Generator, rows: int, columns: int) -> Array:
    """A matrix with orthonormal rows or columns, uniformly distributed."""
    normal = generator.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(normal)
    q *= np.sign(np.diagonal(r))
    return q if rows >= columns else q.T


class Adam:
    """Adam (Kingma and Ba, 2015) on a flat vector, in place."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.first: Float32 = np.zeros(size, np.float32)
        self.second: Float32 = np.zeros(size, np.float32)
        self.count = 0
        self._epsilon = epsilon
        self._a: Float32 = np.empty(size, np.float32)
        self._b: Float32 = np.empty(size, np.float32)

    def step(
        self,
        parameters: Float32,
        gradient: Float32,
        learning_rate: float,
        part: slice = slice(None),
    ) -> None:
        self.count += 1
        self.apply(parameters, gradient, learning_rate, part)

    def apply(
        self, parameters: Float32, gradient: Float32, learning_rate: float, part: slice
    ) -> None:
        """The arithmetic of step `count` for one part; parts are independent of each other."""
        correction = math.sqrt(1.0 - _BETA_2**self.count)
        epsilon = np.array(self._epsilon * correction, np.float32)
        rate = np.array(learning_rate * correction / (1.0 - _BETA_1**self.count), np.float32)
        start, end, _ = part.indices(len(parameters))
        # In pieces that stay in a processor's cache from the first operation to the last.
        for piece_start in range(start, end, _PIECE):
            piece = slice(piece_start, min(piece_start + _PIECE, end))
            g, first, second = gradient[piece], self.first[piece], self.second[piece]
            a, b = self._a[piece], self._b[piece]
            np.subtract(g, first, out=a)
            np.multiply(a, _TO_FIRST, out=a)
            np.add(first, a, out=first)
            np.multiply(g, g, out=b)
            np.subtract(b, second, out=b)
            np.multiply(b, _TO_SECOND, out=b)
            np.add(second, b, out=second)
            # theta -= lr * m_hat / (sqrt(v_hat) + epsilon), corrections folded into scalars.
            np.sqrt(second, out=b)
            np.add(b, epsilon, out=b)
            np.divide(first, b, out=b)
            np.multiply(b, rate, out=b)
            np.subtract(parameters[piece], b, out=parameters[piece])
            if self.count % _SWEEP == 0:
                still = np.abs(first) < _STILL[0]
                first[still] = 0.0
                second[still & (second < _STILL[1])] = 0.0

    def get_state(self, prefix: str) -> dict[str, Array]:
        return {
            f"{prefix}.first": self.first.copy(),
            f"{prefix}.second": self.second.copy(),
            f"{prefix}.count": np.array(self.count, np.int64),
        }

    def load_state(self, prefix: str, state: Mapping[str, Array]) -> None:
        restore(self.first, f"{prefix}.first", state)
        restore(self.second, f"{prefix}.second", state)
        self.count = restore_count(f"{prefix}.count", state)


def clip_by_norm(gradient: Float32, max_norm: float | None) -> float:
    """Scale the gradient in place to at most `max_norm`; the norm it had, NaN included."""
    norm = math.sqrt(compute_square_norm(gradient))
    clip(gradient, norm, max_norm)
    return norm


def compute_square_norm(gradient: Float32) -> float:
    """Of its norm."""
    return float(np.dot(gradient, gradient))


def clip(gradient: Float32, norm: float, max_norm: float | None) -> None:
    """Scale a gradient, or part of one, in place where the whole has a norm above `max_norm`."""
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        np.multiply(gradient, np.float32(max_norm / (norm + 1e-6)), out=gradient)


def restore(target: Array, name: str, state: Mapping[str, Array]) -> None:
    """Copy a saved array into its place. One of another shape is refused, never broadcast."""
    saved = state.get(name)
    if saved is None or saved.shape != target.shape or saved.dtype != target.dtype:
        description = "missing" if saved is None else f"{saved.dtype} {saved.shape}"
        raise LearningError(
            f"The saved learner's {name} is {description}, expected {target.dtype} {target.shape}.",
            "use a checkpoint of the same recipe",
        )
    target[...] = saved


def restore_count(name: str, state: Mapping[str, Array]) -> int:
    """A saved counter, of as much as a run can have counted."""
    count = np.zeros((), np.int64)
    restore(count, name, state)
    if not 0 <= count < _MOST_COUNTED:
        raise LearningError(
            f"The saved learner's {name} is {count}, and no run counts so far.",
            "use an earlier checkpoint of the same run",
        )
    return int(count)
