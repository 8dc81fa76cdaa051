"""What the on-policy algorithms share: the network's shape, schedules, and refusing bad updates.

Must not know: losses, environments, fleets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlflame.config import NetworkSettings
from rlflame.errors import LearningError
from rlflame.rollout.policy import normalise
from rlflame.rollout.spec import Array, Float32, PolicySpec

from . import Batch, Metrics
from .parameters import FlatVector, initialise, network_shapes


@dataclass(frozen=True, slots=True)
class Network:
    """The shape of an actor and, where there is one, its critic."""

    observation_size: int
    layers: int
    tanh: bool
    normalise: bool
    observation_clip: float


def build_network(
    spec: PolicySpec, settings: NetworkSettings, seed: int, *, critic: bool
) -> tuple[Network, FlatVector]:
    """Freshly initialised parameters: `actor.*` first, then `critic.*`."""
    hidden = tuple(spec.hidden)
    shapes = network_shapes("actor", (spec.observation_size, *hidden, spec.action_size))
    if spec.action_kind == "continuous":
        shapes["actor.log_std"] = (spec.action_size,)
    if critic:
        shapes |= network_shapes("critic", (spec.observation_size, *hidden, 1))
    vector = FlatVector(shapes)
    layers = len(hidden) + 1
    gain = math.sqrt(2.0)
    for key, (prefix, last) in enumerate(
        (("actor", settings.last_layer_scale), ("critic", 1.0))[: 2 if critic else 1]
    ):
        initialise(
            vector,
            prefix,
            layers,
            seed=seed,
            orthogonal=settings.orthogonal_init,
            hidden_gain=gain,
            last_gain=last,
            key=key,
        )
    if spec.action_kind == "continuous":
        vector["actor.log_std"][:] = settings.log_std_init
    tanh = spec.activation == "tanh"
    return (
        Network(spec.observation_size, layers, tanh, spec.normalise, spec.observation_clip),
        vector,
    )


def normalised(batch: Batch, network: Network) -> Batch:
    """The batch as the policy that acted saw it."""
    if not network.normalise:
        return batch
    mean = batch.behaviour["normaliser.mean"]
    scale = batch.behaviour["normaliser.scale"]

    def seen(raw: Float32) -> Float32:
        return normalise(raw, mean, scale, network.observation_clip, np.empty_like(raw))

    return dataclasses.replace(
        batch,
        observations=seen(batch.observations),
        last_observations=seen(batch.last_observations),
        boundary_observations=seen(batch.boundary_observations),
    )


def schedule(value: float, anneal: bool, progress: float) -> float:
    """The value itself, or its line down to zero at the horizon."""
    return value * (1.0 - min(1.0, progress)) if anneal else value


def training_metrics(
    parameters: FlatVector, learning_rate: float, gradient_norm: float, updates: int
) -> Metrics:
    """The metrics every gradient algorithm reports alike."""
    metrics = {
        "learning_rate": learning_rate,
        "gradient_norm": gradient_norm,
        "n_updates": float(updates),
    }
    if "actor.log_std" in parameters.shapes:
        metrics["std"] = float(np.exp(parameters["actor.log_std"]).mean())
    return metrics


class Guard:
    """Keeps NaN and infinity out of the weights: refuses, counts, and in the end gives up."""

    limit = 5

    def __init__(self) -> None:
        self.refused = 0
        self._in_a_row = 0

    def refuses(self, norm: float, sums: Metrics) -> bool:
        if math.isfinite(norm) and all(math.isfinite(value) for value in sums.values()):
            self._in_a_row = 0
            return False
        self.refused += 1
        self._in_a_row += 1
        if self._in_a_row >= self.limit:
            raise LearningError(
                f"The loss or its gradient was not a number {self._in_a_row} times in a row "
                f"(gradient norm {norm}); the weights were left as they were.",
                "try a smaller learning rate, for example --set ppo.learning_rate=1e-4",
            )
        return True

    def state(self) -> dict[str, Array]:
        return {"guard": np.array([self.refused, self._in_a_row], np.int64)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        self.refused, self._in_a_row = (int(x) for x in state["guard"])
