"""Stores and initialises network weights in one flat float32 vector."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from rlflame.config.recipe import NetworkSettings
from rlflame.rollout.policy import (
    compute_array_shapes,
    make_clip_bounds,
    make_network_shapes,
    normalise,
)
from rlflame.rollout.seeding import Role, make_stream
from rlflame.rollout.task import Array, Float32, PolicyArrays, PolicySpec

from ..base import Batch, Metrics

Shapes = Mapping[str, tuple[int, ...]]


class FlatVector:
    """A contiguous float32 vector; `vector[name]` is a view of a named array.

    With `leading` axes, the object holds several vectors, and every view begins with these axes.
    """

    def __init__(self, shapes: Shapes, leading: tuple[int, ...] = ()) -> None:
        self.shapes, self.leading = dict(shapes), leading
        size = sum(map(math.prod, self.shapes.values()))
        self.data: Float32 = np.zeros((*leading, size), np.float32)
        self._starts: dict[str, int] = {}
        self._views: dict[str, Float32] = {}
        start = 0
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            self._starts[name] = start
            self._views[name] = self.data[..., start:end].reshape(*leading, *shape)
            start = end

    def __getitem__(self, name: str) -> Float32:
        return self._views[name]

    def get_block(self, layer: str) -> Float32:
        """Return a view of one layer, `[in + 1, out]`: the weights, then a row of biases."""
        fan_in, fan_out = self.shapes[f"{layer}.weight"]
        start, bias = self._starts[f"{layer}.weight"], self._starts[f"{layer}.bias"]
        if bias != start + fan_in * fan_out:
            raise ValueError(f"the biases of {layer} do not follow its weights")
        block = self.data[..., start : bias + fan_out]
        return block.reshape(*self.leading, fan_in + 1, fan_out)

    def find_span(self, prefix: str) -> slice:
        """Return the slice of the vector with all arrays whose names begin with `prefix`."""
        names = [name for name in self.shapes if name.startswith(prefix)]
        start, size = self._starts[names[0]], sum(math.prod(self.shapes[n]) for n in names)
        if self._starts[names[-1]] + math.prod(self.shapes[names[-1]]) != start + size:
            raise ValueError(f"the parts of {prefix} are not adjacent")
        return slice(start, start + size)

    def copy_views(self, prefix: str = "") -> dict[str, Array]:
        """Return copies of the views whose names begin with `prefix`."""
        return {name: v.copy() for name, v in self._views.items() if name.startswith(prefix)}


def build_network(
    spec: PolicySpec, settings: NetworkSettings, seed: int, *, critic: bool
) -> FlatVector:
    """Return freshly initialised parameters: `actor.*` first, then `critic.*`."""
    shapes = {n: s for n, s in compute_array_shapes(spec).items() if n.startswith("actor.")}
    last_gains = {"actor": settings.last_layer_scale}
    if critic:
        shapes |= make_network_shapes("critic", (spec.observation_size, *spec.hidden, 1))
        last_gains["critic"] = 1.0
    vector = FlatVector(shapes)
    layers = len(spec.hidden) + 1
    for key, (prefix, gain) in enumerate(last_gains.items()):
        init_network(vector, prefix, layers, settings, seed=seed, last_gain=gain, key=key)
    if spec.log_std_shape is not None:
        # With gSDE, the noise then has the configured deviation if all latent units are 1 or -1.
        sum_of_units = math.log(spec.hidden[-1]) if spec.exploration == "gsde" else 0.0
        vector["actor.log_std"][:] = settings.log_std_init - 0.5 * sum_of_units
    return vector


def init_network(
    vector: FlatVector,
    prefix: str,
    layers: int,
    settings: NetworkSettings,
    *,
    seed: int,
    last_gain: float,
    key: int,
) -> None:
    """Initialise a network, using a separate random stream for each layer.

    `key` distinguishes the streams of the networks of one run. With `orthogonal_init`, weights are
    orthogonal and biases are zero. Otherwise, both are drawn uniformly between -1/sqrt(fan_in) and
    1/sqrt(fan_in), as in torch's linear layers.
    """
    for layer in range(layers):
        weight, bias = vector[f"{prefix}.{layer}.weight"], vector[f"{prefix}.{layer}.bias"]
        generator = make_stream(seed, Role.INITIALISE, key, layer)
        is_last = layer == layers - 1
        if settings.orthogonal_init:
            gain = last_gain if is_last else math.sqrt(2.0)
            weight[:] = gain * _sample_orthogonal(generator, *weight.shape)
            bias[:] = 0.0
        else:
            bound = 1.0 / math.sqrt(weight.shape[0])
            scale = last_gain if is_last else 1.0
            weight[:] = scale * generator.uniform(-bound, bound, weight.shape)
            bias[:] = scale * generator.uniform(-bound, bound, bias.shape)


def _sample_orthogonal(generator: np.random.Generator, rows: int, columns: int) -> Array:
    """Return a uniformly distributed matrix with orthonormal rows or columns."""
    normal = generator.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(normal)
    q *= np.sign(np.diagonal(r))
    return q if rows >= columns else q.T


def normalise_observations(raw: Float32, policy: PolicyArrays, spec: PolicySpec) -> Float32:
    """Normalise observations with the policy's statistics, if `spec.normalise` is set.

    If rows end with a mask, the result contains the mask too.
    """
    if not spec.normalise:
        return raw
    mean, scale = policy["normaliser.mean"], policy["normaliser.scale"]
    clip = make_clip_bounds(spec)
    if not spec.mask_size:
        return normalise(raw, mean, scale, -clip, clip, np.empty_like(raw))
    result = raw.copy()
    size = spec.observation_size
    normalise(raw[..., :size], mean, scale, -clip, clip, result[..., :size])
    return result


def normalise_batch(batch: Batch, spec: PolicySpec) -> Batch:
    """Return the batch with observations normalised as the acting policy saw them."""
    policy = batch.behaviour
    return dataclasses.replace(
        batch,
        observations=normalise_observations(batch.observations, policy, spec),
        last_observations=normalise_observations(batch.last_observations, policy, spec),
        boundary_observations=normalise_observations(batch.boundary_observations, policy, spec),
    )


def make_training_metrics(parameters: FlatVector, learning_rate: float, updates: int) -> Metrics:
    """Return the metrics that every gradient-based algorithm reports."""
    metrics = {"learning_rate": learning_rate, "n_updates": float(updates)}
    if "actor.log_std" in parameters.shapes:
        metrics["std"] = float(np.exp(parameters["actor.log_std"]).mean())
    return metrics
