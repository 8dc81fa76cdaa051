"""Networks of the on-policy algorithms: their shapes and their initial weights.

Must not know: losses, environments, fleets.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from rlflame.config.recipe import NetworkSettings
from rlflame.rollout.policy import normalise
from rlflame.rollout.spec import Float32, PolicySpec

from ..base import Batch, Metrics
from .flat_params import FlatVector, initialise, make_network_shapes


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """The shape of an actor and, where there is one, its critic."""

    observation_size: int
    layers: int
    tanh: bool
    normalise: bool
    observation_clip: float


def build_network(
    spec: PolicySpec, settings: NetworkSettings, seed: int, *, critic: bool
) -> tuple[NetworkShape, FlatVector]:
    """Freshly initialised parameters: `actor.*` first, then `critic.*`."""
    hidden = tuple(spec.hidden)
    last_gains = {"actor": settings.last_layer_scale}
    shapes = make_network_shapes("actor", (spec.observation_size, *hidden, spec.action_size))
    if spec.log_std_shape is not None:
        shapes["actor.log_std"] = spec.log_std_shape
    if critic:
        shapes |= make_network_shapes("critic", (spec.observation_size, *hidden, 1))
        last_gains["critic"] = 1.0
    vector = FlatVector(shapes)
    layers = len(hidden) + 1
    for key, (prefix, last_gain) in enumerate(last_gains.items()):
        init_network(vector, prefix, layers, settings, seed=seed, last_gain=last_gain, key=key)
    if spec.log_std_shape is not None:
        vector["actor.log_std"][:] = compute_initial_log_std(spec, settings)
    return make_network_shape(spec), vector


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
    """Fill one network as the recipe has it; `key` keeps its streams apart from the others'."""
    initialise(
        vector,
        prefix,
        layers,
        seed=seed,
        orthogonal=settings.orthogonal_init,
        hidden_gain=math.sqrt(2.0),
        last_gain=last_gain,
        key=key,
    )


def make_network_shape(spec: PolicySpec) -> NetworkShape:
    """The shape that a policy's spec implies for its actor, and for critics beside it."""
    return NetworkShape(
        observation_size=spec.observation_size,
        layers=len(spec.hidden) + 1,
        tanh=spec.activation == "tanh",
        normalise=spec.normalise,
        observation_clip=spec.observation_clip,
    )


def compute_initial_log_std(spec: PolicySpec, settings: NetworkSettings) -> float:
    """The setting itself; with gsde, what lets units of size one add up to it."""
    if spec.exploration == "gsde":
        return settings.log_std_init - 0.5 * math.log(spec.hidden[-1])
    return settings.log_std_init


def normalise_batch(batch: Batch, network: NetworkShape) -> Batch:
    """The batch as the policy that acted saw it."""
    if not network.normalise:
        return batch
    mean = batch.behaviour["normaliser.mean"]
    scale = batch.behaviour["normaliser.scale"]

    def normalise_observations(raw: Float32) -> Float32:
        clip = network.observation_clip
        return normalise(raw, mean, scale, -clip, clip, np.empty_like(raw))

    return dataclasses.replace(
        batch,
        observations=normalise_observations(batch.observations),
        last_observations=normalise_observations(batch.last_observations),
        boundary_observations=normalise_observations(batch.boundary_observations),
    )


def make_training_metrics(parameters: FlatVector, learning_rate: float, updates: int) -> Metrics:
    """The metrics every gradient algorithm reports alike."""
    metrics = {"learning_rate": learning_rate, "n_updates": float(updates)}
    if "actor.log_std" in parameters.shapes:
        metrics["std"] = float(np.exp(parameters["actor.log_std"]).mean())
    return metrics
