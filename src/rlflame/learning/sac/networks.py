"""The networks of SAC, their initial weights, and the losses of the critics.

A critic outputs an expected return or quantiles of the return. Values have the shape `[outputs,
rows]` for one critic and `[critics, outputs, rows]` for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlflame.config.algorithms import CriticNorm
from rlflame.config.recipe import NetworkSettings
from rlflame.rollout.policy import make_network_shapes
from rlflame.rollout.task import Float32, PolicySpec

from ..networks.flat_vector import FlatVector, build_network, init_network
from ..networks.mlp import BatchMoments, make_moment_shapes

CRITICS = ("critic0.", "critic1.")


@dataclass(frozen=True, slots=True)
class SacNetworks:
    """The parameters of an actor, of two critics in one vector, and of their targets.

    Critics that standardise their inputs over the batch have moments and no targets.
    """

    spec: PolicySpec
    actor: FlatVector
    critics: FlatVector
    targets: FlatVector
    moments: BatchMoments | None = None
    #: Outputs per critic. The target omits the highest `2 * drop_count` of all outputs.
    quantiles: int = 1
    drop_count: int = 0


def build_sac_networks(
    spec: PolicySpec,
    settings: NetworkSettings,
    seed: int,
    norm: CriticNorm = "none",
    quantiles: int = 1,
    drop_count: int = 0,
) -> SacNetworks:
    actor = build_network(spec, settings, seed, critic=False)
    if spec.log_std_shape is None:
        actor[f"actor.{len(spec.hidden)}.bias"][spec.action_size :] += settings.log_std_init
    sizes = (spec.observation_size + spec.action_size, *spec.hidden, quantiles)
    critics = FlatVector(
        {
            name: shape
            for prefix in CRITICS
            for name, shape in make_network_shapes(prefix[:-1], sizes).items()
        }
    )
    for key, prefix in enumerate(CRITICS, 1):
        layers = len(sizes) - 1
        init_network(critics, prefix[:-1], layers, settings, seed=seed, last_gain=1.0, key=key)
    if norm == "batch":
        moments = BatchMoments(
            {n: s for prefix in CRITICS for n, s in make_moment_shapes(prefix[:-1], sizes).items()}
        )
        targets = FlatVector({})
    else:
        moments, targets = None, FlatVector(critics.shapes)
        targets.data[:] = critics.data
    return SacNetworks(spec, actor, critics, targets, moments, quantiles, drop_count)


class ClippedDoubleQ:
    """Uses the lower of two expected returns, and half the squared error as the loss.

    `compute_target_values` combines both critics' values into a new array and keeps NaN and
    infinity, so that the guard detects them. `compute_error` returns d(loss / count)/d(values) of
    one critic and the sum of its squared errors. `compute_slopes` returns the derivatives of the
    actor's loss with respect to each critic's values, and the sum of the action values.
    """

    outputs = 1

    def compute_target_values(self, values: Float32) -> Float32:
        lower: Float32 = np.minimum(*values)
        return lower

    def compute_error(self, values: Float32, target: Float32, count: int) -> tuple[Float32, float]:
        error: Float32 = values - target
        square = float(np.dot(error[0], error[0]))
        error *= np.float32(1.0 / count)
        return error, square

    def compute_slopes(self, values: Float32, count: int) -> tuple[list[Float32], float]:
        first, second = values
        # Only the critic with the lower value has a slope.
        first_is_lower = first <= second
        share = np.float32(-1.0 / count)
        slopes = [first_is_lower * share, ~first_is_lower * share]
        return slopes, float(np.minimum(first, second).sum(dtype=np.float64))


class TruncatedQuantiles:
    """Uses quantiles of the return from both critics; the target omits the highest.

    The loss is the quantile Huber loss, and the value of an action is the mean of all quantiles
    (TQC; Kuznetsov et al., 2020). The reported error is the squared error of a critic's mean.
    """

    def __init__(self, outputs: int, drop_count: int) -> None:
        self.outputs = outputs
        self._drop_count = drop_count
        #: The probabilities of the quantiles: the midpoints of `outputs` equal intervals.
        self._fractions = [(2 * place + 1) / (2 * outputs) for place in range(outputs)]

    def compute_target_values(self, values: Float32) -> Float32:
        target_count = len(values) * (self.outputs - self._drop_count)
        # Make the values of a row contiguous for sorting, then restore the layout.
        pool = np.concatenate([value.T for value in values], axis=1)
        pool.sort(axis=1)
        # NaN and infinity are sorted last and would be dropped unnoticed.
        pool[~np.isfinite(pool[:, -1])] = np.nan
        return np.ascontiguousarray(pool[:, :target_count].T)

    def compute_error(self, values: Float32, target: Float32, count: int) -> tuple[Float32, float]:
        slope: Float32 = np.empty_like(values)
        difference: Float32 = np.empty_like(target)
        # numpy compares two arrays faster than an array and a row.
        low, zero, high = (np.full_like(target, bound) for bound in (-1.0, 0.0, 1.0))
        for place, fraction in enumerate(self._fractions):
            np.subtract(target, values[place], out=difference)
            np.minimum(difference, high, out=difference)
            np.maximum(difference, low, out=difference)
            total = np.add.reduce(difference, axis=0)
            np.minimum(difference, zero, out=difference)
            shortfall = np.add.reduce(difference, axis=0)
            # The weight is 1 - fraction for a value above the target, and fraction for one below.
            total *= np.float32(fraction)
            shortfall *= np.float32(1.0 - 2.0 * fraction)
            np.add(total, shortfall, out=slope[place])
        slope *= np.float32(-1.0 / (len(target) * len(values) * count))
        mean_error = values.mean(axis=0) - target.mean(axis=0)
        return slope, float(np.dot(mean_error, mean_error))

    def compute_slopes(self, values: Float32, count: int) -> tuple[list[Float32], float]:
        share = 1.0 / (len(values) * self.outputs)
        slopes = [np.full_like(value, -share / count) for value in values]
        return slopes, share * sum(float(value.sum(dtype=np.float64)) for value in values)


def make_critic_loss(quantiles: int, drop_count: int) -> ClippedDoubleQ | TruncatedQuantiles:
    return ClippedDoubleQ() if quantiles == 1 else TruncatedQuantiles(quantiles, drop_count)
