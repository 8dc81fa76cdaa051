"""The forward pass of a policy in numpy, including observation normalisation.

Every matrix product uses contiguous arrays with as many rows as the spec's `width`, because the
last bits of a row in a float32 product depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import numpy as np

from .distributions import MASKED_LOGIT, find_choice_outputs, find_distribution, repeat_row
from .task import Array, Float32, PolicyArrays, PolicySpec


def make_network_shapes(prefix: str, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a perceptron's weights `[in, out]` and biases."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        shapes[f"{prefix}.{layer}.weight"] = (fan_in, fan_out)
        shapes[f"{prefix}.{layer}.bias"] = (fan_out,)
    return shapes


def compute_array_shapes(spec: PolicySpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every array of a policy with this spec."""
    sizes = (spec.observation_size, *spec.hidden, spec.output_size)
    shapes = make_network_shapes("actor", sizes)
    if spec.log_std_shape is not None:
        shapes["actor.log_std"] = spec.log_std_shape
    if spec.normalise:
        shapes["normaliser.mean"] = (spec.observation_size,)
        shapes["normaliser.scale"] = (spec.observation_size,)
    return shapes


def normalise(
    observations: Float32,
    mean: Float32,
    scale: Float32,
    low: Float32 | float,
    high: Float32 | float,
    out: Float32,
) -> Float32:
    """Compute `clip((x - mean) * scale)`. Workers and learners share this function."""
    np.subtract(observations, mean, out)
    np.multiply(out, scale, out)
    np.maximum(out, low, out=out)
    return np.minimum(out, high, out=out)


def make_clip_bounds(spec: PolicySpec) -> Float32 | float:
    """Return the upper bounds of normalised observations; the lower bounds are their negatives."""
    if not spec.choice_spans:
        return spec.observation_clip
    bounds: Float32 = np.full(spec.observation_size, spec.observation_clip, np.float32)
    for start, end in spec.choice_spans:
        bounds[start:end] = np.inf
    return bounds


class Policy:
    """One version of a policy's weights, and the buffers of its forward pass.

    With several slots, the buffers have `spec.width` rows for each slot. Matrix products are
    computed separately for each slot. Operations that do not mix rows run over all rows at once.
    """

    def __init__(self, spec: PolicySpec, arrays: PolicyArrays, slots: int = 1) -> None:
        self.spec = spec
        height = slots * spec.width
        self._slot_slices = [
            slice(first, first + spec.width) for first in range(0, height, spec.width)
        ]
        self._active_slices = self._slot_slices
        self._layers: list[tuple[Float32, Float32, Float32]] = []
        for layer in range(len(spec.hidden) + 1):
            weight = np.ascontiguousarray(arrays[f"actor.{layer}.weight"], dtype=np.float32)
            out = np.zeros((height, weight.shape[1]), np.float32)
            self._layers.append((weight, repeat_row(arrays[f"actor.{layer}.bias"], height), out))
        self._input = np.zeros((height, spec.observation_size), np.float32)
        if spec.normalise:
            self._mean = repeat_row(arrays["normaliser.mean"], height)
            self._scale = repeat_row(arrays["normaliser.scale"], height)
            # Arrays, because numpy would convert a scalar bound at each use, which is slow.
            self._high = np.full_like(self._input, make_clip_bounds(spec))
            self._low = -self._high
        self._choice_outputs = find_choice_outputs(spec) if spec.mask_size else None
        latent = self._layers[-2][2] if spec.hidden else self._input
        self.distribution = find_distribution(spec)(replace(spec, width=height), arrays, latent)

    def set_active_slots(self, slots: Collection[int]) -> None:
        """Set the slots whose outputs are computed. Other outputs are undefined."""
        self._active_slices = [self._slot_slices[slot] for slot in sorted(slots)]

    def forward(self, rows: Float32) -> Float32:
        """Return the outputs for every row, in a buffer that the next call overwrites.

        The logits of choices that the mask of a row forbids are `MASKED_LOGIT`.
        """
        size = self.spec.observation_size
        hidden = observations = rows[:, :size] if self.spec.mask_size else rows
        if self.spec.normalise:
            hidden = normalise(
                observations, self._mean, self._scale, self._low, self._high, self._input
            )
        elif self.spec.mask_size:
            np.copyto(self._input, observations)
            hidden = self._input
        last = len(self._layers) - 1
        tanh = self.spec.activation == "tanh"
        for layer, (weight, bias, out) in enumerate(self._layers):
            self._multiply(hidden, weight, out)
            np.add(out, bias, out)
            if layer < last:
                if tanh:
                    np.tanh(out, out)
                else:
                    np.maximum(out, 0.0, out=out)
            hidden = out
        if self._choice_outputs is not None:
            logits = hidden[:, self._choice_outputs]
            hidden[:, self._choice_outputs] = np.where(rows[:, size:] > 0, logits, MASKED_LOGIT)
        return hidden

    def _multiply(self, rows: Float32, weight: Float32, out: Float32) -> None:
        if len(self._slot_slices) == 1:
            rows.dot(weight, out)
        else:
            for part in self._active_slices:
                rows[part].dot(weight, out[part])

    def sample(self, observations: Float32, noise: Float32) -> tuple[Array, Float32]:
        """Sample actions with noise from `draw_noise`; return actions and log-densities."""
        block = self.distribution.prepare_noise(noise[None])
        actions, log_probs = self.distribution.sample(self.forward(observations), block, 0)
        return actions.copy(), log_probs

    def mode(self, observations: Float32) -> Array:
        """Return the deterministic action of each row."""
        return self.distribution.mode(self.forward(observations))

    def to_environment(self, actions: Array) -> Array:
        """Convert recorded actions to the actions that environments receive."""
        return self.distribution.to_environment(actions)
