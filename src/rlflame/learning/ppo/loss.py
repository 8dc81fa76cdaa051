"""The clipped loss of PPO over a minibatch, and its gradient, derived by hand.

`ppo.py` defines the loss. The gradients of the two networks are independent, so two processes can
each compute one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np

from rlflame.config.algorithms import PpoSettings
from rlflame.rollout.task import Array, Float32, PolicySpec

from ..base import GradientProvider, Metrics
from ..networks.actor import Actor
from ..networks.flat_vector import FlatVector
from ..networks.heads import Sum
from ..networks.mlp import CHUNK_ROWS, MLP, MakeNetwork
from ..parallel.process_group import Shard
from ..parallel.units import ShardGradients

#: The networks, with the names of the sums that are returned with each gradient.
NETWORKS = {
    "actor": ("policy_gradient_loss", "entropy_loss", "approx_kl", "clip_fraction"),
    "critic": ("value_loss",),
}
#: Training on a batch stops once a minibatch's KL estimate exceeds this multiple of the target.
KL_STOP_FACTOR = 1.5
_ZERO, _FLOAT_ONE = np.array(0.0, np.float32), np.array(1.0, np.float32)


@dataclass(slots=True)
class PpoMinibatch:
    """A minibatch of samples, with the coefficients of the loss for this update."""

    observations: Float32
    actions: Array
    log_probs: Float32
    advantages: Float32
    returns: Float32
    old_values: Float32
    clip_range: float
    clip_range_value: float | None
    value_weight: float
    entropy_weight: float

    def select_rows(self, rows: slice) -> PpoMinibatch:
        if rows.start == 0 and rows.stop == len(self.returns):
            return self
        return PpoMinibatch(
            self.observations[rows],
            self.actions[rows],
            self.log_probs[rows],
            self.advantages[rows],
            self.returns[rows],
            self.old_values[rows],
            self.clip_range,
            self.clip_range_value,
            self.value_weight,
            self.entropy_weight,
        )

    def divide(self, count: int) -> PpoMinibatch:
        """Return the minibatch with a leading axis of `count` equal shards."""
        shape = count, len(self.returns) // count
        return PpoMinibatch(
            self.observations.reshape(*shape, -1),
            self.actions.reshape(*shape, *self.actions.shape[1:]),
            self.log_probs.reshape(shape),
            self.advantages.reshape(shape),
            self.returns.reshape(shape),
            self.old_values.reshape(shape),
            self.clip_range,
            self.clip_range_value,
            self.value_weight,
            self.entropy_weight,
        )


class PpoProvider(GradientProvider[PpoMinibatch], Protocol):
    """Computes the gradients of both networks, and the critic's estimates."""

    #: The largest number of rows that `compute_values` computes at once.
    chunk_rows: int

    def compute_gradient(
        self, minibatch: PpoMinibatch, count: int, networks: Sequence[str] = ...
    ) -> tuple[Float32, Metrics]:
        """Return the gradient of these networks; the rest of the vector is undefined."""

    def compute_shards(
        self, minibatch: PpoMinibatch, count: int, networks: Sequence[str], shards: Sequence[Shard]
    ) -> Iterator[ShardGradients]:
        """Yield the results of `compute_gradient` for these adjacent shards, in order."""
        for shard in shards:
            rows = minibatch.select_rows(shard.rows)
            gradient, sums = self.compute_gradient(rows, count, networks)
            yield gradient[None], [sums]

    def compute_values(self, observations: Float32) -> Float32:
        """Return the critic's estimate for each normalised observation."""


class _Networks:
    """The networks and their gradients, for one shard or several shards of equal size."""

    def __init__(
        self,
        parameters: FlatVector,
        spec: PolicySpec,
        make_network: MakeNetwork = MLP,
        leading: tuple[int, ...] = (),
    ) -> None:
        self.gradients = FlatVector(parameters.shapes, leading)
        shape = len(spec.hidden) + 1, spec.activation == "tanh"
        self.actor = Actor(parameters, self.gradients, spec, make_network)
        self.critic = make_network(parameters, self.gradients, "critic", *shape)
        self._spec = spec

    def compute_values(self, rows: Float32) -> Float32:
        """Return the critic's estimates for rows, which may end with a mask."""
        if self._spec.mask_size:
            rows = rows[..., : self._spec.observation_size]
        return self.critic.forward(rows)[..., 0, :]

    def compute_sums(
        self, minibatch: PpoMinibatch, count: int, names: Sequence[str]
    ) -> dict[str, Sum]:
        """Write the gradients of the named networks; return the sums of each shard."""
        sums: dict[str, Sum] = {}
        if "actor" in names:
            sums |= self._compute_policy_gradient(minibatch, count)
        if "critic" in names:
            sums["value_loss"] = self._compute_value_gradient(minibatch, count)
        return sums

    def _compute_policy_gradient(self, batch: PpoMinibatch, count: int) -> dict[str, Sum]:
        log_probs = self.actor.log_prob(batch.observations, batch.actions)
        log_ratio = log_probs - batch.log_probs
        ratio = np.exp(log_ratio)
        clip_ratio = np.minimum(np.maximum(ratio, 1.0 - batch.clip_range), 1.0 + batch.clip_range)
        changes = clip_ratio != ratio
        surrogate = ratio * batch.advantages
        clip_ratio *= batch.advantages
        # Where the clipped term is smaller, the objective does not depend on the ratio.
        d_log_prob = np.where(surrogate <= clip_ratio, surrogate, _ZERO)
        d_log_prob *= np.float32(-1.0 / count)
        self.actor.backward(d_log_prob, -batch.entropy_weight / count)
        objective = np.minimum(surrogate, clip_ratio)
        ratio -= _FLOAT_ONE
        ratio -= log_ratio
        return {
            "policy_gradient_loss": -np.add.reduce(objective, axis=-1),
            "entropy_loss": -self.actor.sum_entropy(),
            "approx_kl": np.add.reduce(ratio, axis=-1),
            # With an axis, count_nonzero is several times slower.
            "clip_fraction": np.count_nonzero(changes, axis=None if changes.ndim == 1 else -1),
        }

    def _compute_value_gradient(self, batch: PpoMinibatch, count: int) -> Sum:
        """Write the gradient of the value loss, which may be clipped; return the loss."""
        values = self.compute_values(batch.observations)
        error = values - batch.returns
        slope = error
        loss = error * error
        if batch.clip_range_value is not None:
            limit = batch.clip_range_value
            change = values - batch.old_values
            clip_change = np.minimum(np.maximum(change, -limit), limit)
            clip_error = batch.old_values + clip_change - batch.returns
            clip_loss = clip_error * clip_error
            # Where the clipped value has the larger error, the loss does not depend on the value.
            slope = np.where((clip_loss > loss) & (clip_change != change), 0.0, error)
            loss = np.maximum(loss, clip_loss)
        upstream = slope * np.float32(2.0 * batch.value_weight / count)
        self.critic.backward(upstream[..., None, :])
        result: Float32 = np.add.reduce(loss, axis=-1)
        return result


class NumpyPpo(PpoProvider):
    """Computes the loss of PPO and its gradient in numpy."""

    chunk_rows = CHUNK_ROWS

    def __init__(
        self, parameters: FlatVector, spec: PolicySpec, make_network: MakeNetwork = MLP
    ) -> None:
        self._parameters, self._spec, self._make_network = parameters, spec, make_network
        self._networks = _Networks(parameters, spec, make_network)
        #: The networks for several shards of equal size, by the number of shards.
        self._group_networks: dict[int, _Networks] = {}

    def compute_gradient(
        self, minibatch: PpoMinibatch, count: int, networks: Sequence[str] = tuple(NETWORKS)
    ) -> tuple[Float32, Metrics]:
        sums = self._networks.compute_sums(minibatch, count, networks)
        return self._networks.gradients.data, {name: float(sums[name]) for name in sums}

    def compute_shards(
        self, minibatch: PpoMinibatch, count: int, networks: Sequence[str], shards: Sequence[Shard]
    ) -> Iterator[ShardGradients]:
        # The head of gSDE has no leading axis.
        if len(shards) == 1 or self._spec.exploration == "gsde":
            return super().compute_shards(minibatch, count, networks, shards)
        return self._compute_groups(minibatch, count, networks, shards)

    def _compute_groups(
        self, minibatch: PpoMinibatch, count: int, networks: Sequence[str], shards: Sequence[Shard]
    ) -> Iterator[ShardGradients]:
        """Yield the results of `compute_gradient`; compute shards of equal size in one pass."""
        for _, group in groupby(shards, key=lambda shard: shard.rows.stop - shard.rows.start):
            equal = list(group)
            rows = minibatch.select_rows(slice(equal[0].rows.start, equal[-1].rows.stop))
            if len(equal) == 1:
                gradient, sums = self.compute_gradient(rows, count, networks)
                yield gradient[None], [sums]
            else:
                yield self._compute_equal_shards(rows, count, networks, len(equal))

    def compute_values(self, observations: Float32) -> Float32:
        result = np.empty(len(observations), np.float32)
        for start in range(0, len(result), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            result[part] = self._networks.compute_values(observations[part])
        return result

    def _compute_equal_shards(
        self, rows: PpoMinibatch, count: int, networks: Sequence[str], shard_count: int
    ) -> ShardGradients:
        group = self._group_networks.get(shard_count)
        if group is None:
            leading = (shard_count,)
            group = _Networks(self._parameters, self._spec, self._make_network, leading)
            self._group_networks[shard_count] = group
        sums = group.compute_sums(rows.divide(shard_count), count, networks)
        columns = [np.asarray(values, np.float64).tolist() for values in sums.values()]
        return group.gradients.data, [
            dict(zip(sums, values, strict=True)) for values in zip(*columns, strict=True)
        ]


class LossMeans:
    """Averages metrics over the minibatches of one iteration."""

    def __init__(self, settings: PpoSettings) -> None:
        self._settings = settings
        self.sums: Metrics = {}
        self.samples = 0
        self.norm = 0.0

    def add(self, samples: int, sums: Metrics, norm: float) -> None:
        self.samples += samples
        self.norm = norm
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def make_metrics(self, epochs_done: int) -> Metrics:
        """Return means over all samples; omit them if all minibatches were skipped."""
        metrics = {"epochs_done": float(epochs_done)}
        if self.samples:
            means = {name: total / self.samples for name, total in self.sums.items()}
            loss = (
                means["policy_gradient_loss"]
                + self._settings.value_weight * means["value_loss"]
                + self._settings.entropy_weight * means["entropy_loss"]
            )
            metrics |= {"loss": loss, **means, "gradient_norm": self.norm}
        return metrics


def find_kl_limit(settings: PpoSettings) -> float | None:
    """Return the KL estimate of a minibatch above which training on a batch stops."""
    return None if settings.target_kl is None else KL_STOP_FACTOR * settings.target_kl


def find_spans(parameters: FlatVector) -> dict[str, slice]:
    """Return the span of each network in the flat vector."""
    return {name: parameters.find_span(f"{name}.") for name in NETWORKS}


def compute_norm(squares: Sequence[float]) -> float:
    """Return the norm of a gradient from the squared norms of both networks."""
    return math.sqrt(squares[0] + squares[1])
