"""The clipped loss of PPO over a minibatch, and its gradient, derived by hand.

`ppo.py` defines the loss. The gradients of the two networks are independent, so two processes can
compute one each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlflame.rollout.task import Array, Float32, PolicySpec

from ..base import GradientProvider, Metrics
from ..networks.flat_vector import FlatVector
from ..networks.heads import make_head
from ..networks.mlp import CHUNK_ROWS, MLP

#: The networks, and the sums that accompany each gradient.
NETWORKS = {
    "actor": ("policy_gradient_loss", "entropy_loss", "approx_kl", "clip_fraction"),
    "critic": ("value_loss",),
}
_ZERO, _FLOAT_ONE = np.array(0.0, np.float32), np.array(1.0, np.float32)


@dataclass(slots=True)
class PpoMinibatch:
    """The arrays of the samples, and the coefficients of the loss for this update."""

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


class PpoProvider(GradientProvider[PpoMinibatch], Protocol):
    """Computes the gradients of both networks, and the critic's estimates."""

    #: The largest number of rows that `compute_values` computes at once.
    chunk_rows: int

    def compute_gradient(
        self, minibatch: PpoMinibatch, count: int, networks: Sequence[str] = ...
    ) -> tuple[Float32, Metrics]:
        """Return the gradient of these networks; the rest of the vector is undefined."""

    def compute_values(self, observations: Float32) -> Float32:
        """Return the critic's estimate for each normalised observation."""


class NumpyPpo:
    """The loss and its gradient in numpy."""

    chunk_rows = CHUNK_ROWS

    def __init__(self, parameters: FlatVector, spec: PolicySpec) -> None:
        self._gradients = FlatVector(parameters.shapes)
        shape = len(spec.hidden) + 1, spec.activation == "tanh"
        self._actor = MLP(parameters, self._gradients, "actor", *shape)
        self._critic = MLP(parameters, self._gradients, "critic", *shape)
        self._head = make_head(parameters, self._gradients, self._actor)

    def compute_gradient(
        self, minibatch: PpoMinibatch, count: int, networks: Sequence[str] = tuple(NETWORKS)
    ) -> tuple[Float32, Metrics]:
        sums: Metrics = {}
        if "actor" in networks:
            sums |= self._compute_policy_gradient(minibatch, count)
        if "critic" in networks:
            sums["value_loss"] = self._compute_value_gradient(minibatch, count)
        return self._gradients.data, sums

    def compute_values(self, observations: Float32) -> Float32:
        result = np.empty(len(observations), np.float32)
        for start in range(0, len(result), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            result[part] = self._critic.forward(observations[part])[0]
        return result

    def _compute_policy_gradient(self, batch: PpoMinibatch, count: int) -> Metrics:
        log_probs = self._head.log_prob(self._actor.forward(batch.observations), batch.actions)
        log_ratio = log_probs - batch.log_probs
        ratio = np.exp(log_ratio)
        clip_ratio = np.minimum(np.maximum(ratio, 1.0 - batch.clip_range), 1.0 + batch.clip_range)
        clip_count = np.count_nonzero(clip_ratio != ratio)
        surrogate = ratio * batch.advantages
        clip_ratio *= batch.advantages
        # Where the clipped term is smaller, the objective is constant in the ratio.
        d_log_prob = np.where(surrogate <= clip_ratio, surrogate, _ZERO)
        d_log_prob *= np.float32(-1.0 / count)
        self._actor.backward(self._head.backward(d_log_prob, -batch.entropy_weight / count))
        objective = np.minimum(surrogate, clip_ratio)
        ratio -= _FLOAT_ONE
        ratio -= log_ratio
        return {
            "policy_gradient_loss": -float(np.add.reduce(objective)),
            "entropy_loss": -self._head.sum_entropy(),
            "approx_kl": float(np.add.reduce(ratio)),
            "clip_fraction": float(clip_count),
        }

    def _compute_value_gradient(self, batch: PpoMinibatch, count: int) -> float:
        """Write the gradient of the squared error; with a value clip, the larger one."""
        values = self._critic.forward(batch.observations)[0]
        error = values - batch.returns
        slope = error
        loss = error * error
        if batch.clip_range_value is not None:
            limit = batch.clip_range_value
            change = values - batch.old_values
            clip_change = np.minimum(np.maximum(change, -limit), limit)
            clip_error = batch.old_values + clip_change - batch.returns
            clip_loss = clip_error * clip_error
            # Where the clipped value has the larger error, the loss is constant in the value.
            slope = np.where((clip_loss > loss) & (clip_change != change), 0.0, error)
            loss = np.maximum(loss, clip_loss)
        upstream = slope * np.float32(2.0 * batch.value_weight / count)
        self._critic.backward(upstream[None])
        return float(np.add.reduce(loss))


def find_spans(parameters: FlatVector) -> dict[str, slice]:
    """Return the span of each network in the flat vector."""
    return {name: parameters.find_span(f"{name}.") for name in NETWORKS}


def compute_norm(squares: Sequence[float]) -> float:
    """Return the norm of a gradient from the squared norms of the networks, in order."""
    return math.sqrt(squares[0] + squares[1])
