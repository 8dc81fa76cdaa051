"""The numpy forward pass that acts: categorical or Gaussian, normaliser inside.

Every pass runs at the spec's one width on contiguous arrays, because a row's last bits in a
float32 product depend on how many rows share it. Must not know: environments, learning, time.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from .spec import Array, Float32, PolicyArrays, PolicySpec

_LOG_TWO_PI = math.log(2.0 * math.pi)


def expected_shapes(spec: PolicySpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every array that a policy of this spec consists of."""
    shapes: dict[str, tuple[int, ...]] = {}
    sizes = (spec.observation_size, *spec.hidden, spec.action_size)
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        shapes[f"actor.{layer}.weight"] = (fan_in, fan_out)
        shapes[f"actor.{layer}.bias"] = (fan_out,)
    if spec.action_kind == "continuous":
        shapes["actor.log_std"] = (spec.action_size,)
    if spec.normalise:
        shapes["normaliser.mean"] = (spec.observation_size,)
        shapes["normaliser.scale"] = (spec.observation_size,)
    return shapes


def normalise(
    observations: Float32, mean: Float32, scale: Float32, clip: float, out: Float32
) -> Float32:
    """`clip((x - mean) * scale)`, the one spelling that worker and learner share."""
    np.subtract(observations, mean, out=out)
    np.multiply(out, scale, out=out)
    np.maximum(out, -clip, out=out)
    return np.minimum(out, clip, out=out)


class Policy:
    """One version of the weights, with its buffers; rows of `observations` are filled in place."""

    def __init__(self, spec: PolicySpec, arrays: PolicyArrays) -> None:
        self.spec = spec
        width = spec.width
        self._layers: list[tuple[Float32, Float32, Float32]] = []
        for layer in range(len(spec.hidden) + 1):
            weight = np.ascontiguousarray(arrays[f"actor.{layer}.weight"], dtype=np.float32)
            bias = np.ascontiguousarray(arrays[f"actor.{layer}.bias"], dtype=np.float32)
            out = np.zeros((width, weight.shape[1]), np.float32)
            self._layers.append((weight, bias, out))
        self._input = np.zeros((width, spec.observation_size), np.float32)
        if spec.normalise:
            self._mean = np.ascontiguousarray(arrays["normaliser.mean"], dtype=np.float32)
            self._scale = np.ascontiguousarray(arrays["normaliser.scale"], dtype=np.float32)
        self._rows = np.arange(width)
        self._low = np.asarray(spec.action_low, np.float32)
        self._high = np.asarray(spec.action_high, np.float32)
        if spec.action_kind == "continuous":
            log_std = np.ascontiguousarray(arrays["actor.log_std"], dtype=np.float32)
            self._std = np.exp(log_std)
            self._log_density = np.float32(
                -float(np.sum(log_std, dtype=np.float64)) - 0.5 * spec.action_size * _LOG_TWO_PI
            )
            self._scratch = np.zeros((width, spec.action_size), np.float32)

    def forward(self, observations: Float32) -> Float32:
        """Means or logits `[width, action_size]`; the buffer is overwritten by the next call."""
        hidden = observations
        if self.spec.normalise:
            hidden = normalise(
                observations, self._mean, self._scale, self.spec.observation_clip, self._input
            )
        last = len(self._layers) - 1
        for layer, (weight, bias, out) in enumerate(self._layers):
            np.matmul(hidden, weight, out=out)
            np.add(out, bias, out=out)
            if layer < last:
                if self.spec.activation == "tanh":
                    np.tanh(out, out=out)
                else:
                    np.maximum(out, 0.0, out=out)
            hidden = out
        return hidden

    def sample(self, observations: Float32, noise: Float32) -> tuple[Array, Float32]:
        """Actions drawn with the given noise (normal, or one uniform a row) and log-densities."""
        head = self.forward(observations)
        if self.spec.action_kind == "continuous":
            actions = head + self._std * noise
            np.multiply(noise, noise, out=self._scratch)
            log_probs = np.add.reduce(self._scratch, axis=1) * np.float32(-0.5) + self._log_density
            return actions, log_probs
        log_softmax = head - np.maximum.reduce(head, axis=1, keepdims=True)
        log_softmax -= np.log(np.add.reduce(np.exp(log_softmax), axis=1, keepdims=True))
        cumulative = np.add.accumulate(np.exp(log_softmax), axis=1)
        # A uniform number may be 0 exactly, and must not pick a choice of probability 0.
        picked = np.add.reduce(cumulative <= noise, axis=1, dtype=np.int64)
        np.minimum(picked, self.spec.action_size - 1, out=picked)
        return picked, log_softmax[self._rows, picked]

    def best(self, observations: Float32) -> Array:
        """The deterministic action of each row: the mean, or the most likely choice."""
        head = self.forward(observations)
        return head.copy() if self.spec.action_kind == "continuous" else head.argmax(axis=1)

    def to_environment(self, actions: Array) -> Array:
        """What the environments are given: a Gaussian's tails are cut at the action bounds."""
        if self.spec.action_kind == "continuous":
            return np.minimum(np.maximum(actions, self._low), self._high)
        return actions


def noise_size(spec: PolicySpec) -> int:
    """Random numbers a row consumes each step."""
    return spec.action_size if spec.action_kind == "continuous" else 1


def draw_noise(spec: PolicySpec, generator: np.random.Generator, steps: int) -> Float32:
    """`[steps, noise_size]` for one row: normal for a Gaussian, uniform for a choice."""
    if spec.action_kind == "continuous":
        return generator.standard_normal((steps, spec.action_size), dtype=np.float32)
    return generator.random((steps, 1), dtype=np.float32)
