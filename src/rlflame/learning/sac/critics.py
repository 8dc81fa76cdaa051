"""What two critics' outputs say an action is worth, by hand: two numbers, or quantiles of returns.

Values are `[outputs, rows]`, and of both critics `[critics, outputs, rows]`. Must not know:
networks, the actor, the critics' equation.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rlflame.rollout.spec import Float32


class CriticLoss(Protocol):
    outputs: int

    def compute_target_values(self, values: Float32) -> Float32:
        """Of both critics' values, those that a critic may learn from; an array of its own.

        What is not finite is never left out: it has to reach whoever refuses the update.
        """

    def compute_error(self, values: Float32, target: Float32, count: int) -> tuple[Float32, float]:
        """d(loss)/d(values) of one critic over `count`; and how far it is off, squared, in sum."""

    def compute_slopes(self, values: Float32, count: int) -> tuple[list[Float32], float]:
        """d(-worth / count)/d(values) of each critic; and the worth, in sum."""


class ClippedDoubleQ:
    """The lower of two expected returns, learned by half the squared error."""

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
        # Only the lower of the two values counts, so only its critic is asked for a slope.
        first_is_lower = first <= second
        share = np.float32(-1.0 / count)
        slopes = [first_is_lower * share, ~first_is_lower * share]
        return slopes, float(np.minimum(first, second).sum(dtype=np.float64))


class TruncatedQuantiles:
    """As many quantiles of the return from each critic; the highest of all are not learned from.

    They are learned by the Huber loss of quantiles, and an action is worth the mean of all
    (TQC; Kuznetsov et al., 2020). What a critic is off by is told of its mean.
    """

    def __init__(self, outputs: int, dropped: int) -> None:
        self.outputs = outputs
        self._dropped = dropped
        #: Each output stands for the middle of an equal share of the probability.
        self._fractions = [(2 * place + 1) / (2 * outputs) for place in range(outputs)]

    def compute_target_values(self, values: Float32) -> Float32:
        target_count = len(values) * (self.outputs - self._dropped)
        # Sorted where a row's lie side by side, and laid out as the values are again.
        pooled = np.concatenate([value.T for value in values], axis=1)
        pooled.sort(axis=1)
        # What is not finite has been put last, where it would be left out unseen.
        pooled[~np.isfinite(pooled[:, -1])] = np.nan
        return np.ascontiguousarray(pooled[:, :target_count].T)

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
            below = np.add.reduce(difference, axis=0)
            # Too high counts by 1 - fraction, too low by the fraction; at 0 both are nothing.
            total *= np.float32(fraction)
            below *= np.float32(1.0 - 2.0 * fraction)
            np.add(total, below, out=slope[place])
        slope *= np.float32(-1.0 / (len(target) * len(values) * count))
        mean_error = values.mean(axis=0) - target.mean(axis=0)
        return slope, float(np.dot(mean_error, mean_error))

    def compute_slopes(self, values: Float32, count: int) -> tuple[list[Float32], float]:
        share = 1.0 / (len(values) * self.outputs)
        slopes = [np.full_like(value, -share / count) for value in values]
        return slopes, share * sum(float(value.sum(dtype=np.float64)) for value in values)


def make_critic_loss(quantiles: int, dropped: int) -> CriticLoss:
    return ClippedDoubleQ() if quantiles == 1 else TruncatedQuantiles(quantiles, dropped)
