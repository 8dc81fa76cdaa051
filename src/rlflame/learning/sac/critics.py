"""What two critics' outputs say an action is worth, by hand: two numbers, or quantiles of returns.

Values are `[outputs, rows]`, and of both critics `[critics, outputs, rows]`. Must not know:
networks, the actor, the critics' equation.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rlflame.rollout.spec import Float32


class Worth(Protocol):
    outputs: int

    def lowest(self, values: Float32) -> Float32:
        """Of both critics' values, those that a critic may learn from; an array of its own.

        What is not finite is never left out: it has to reach whoever refuses the update.
        """

    def error(self, values: Float32, wanted: Float32, count: int) -> tuple[Float32, float]:
        """d(loss)/d(values) of one critic over `count`; and how far it is off, squared, in sum."""

    def slopes(self, values: Float32, count: int) -> tuple[list[Float32], float]:
        """d(-worth / count)/d(values) of each critic; and the worth, in sum."""


class Lower:
    """The lower of two expected returns, learned by half the squared error."""

    outputs = 1

    def lowest(self, values: Float32) -> Float32:
        lower: Float32 = np.minimum(*values)
        return lower

    def error(self, values: Float32, wanted: Float32, count: int) -> tuple[Float32, float]:
        error: Float32 = values - wanted
        square = float(np.dot(error[0], error[0]))
        error *= np.float32(1.0 / count)
        return error, square

    def slopes(self, values: Float32, count: int) -> tuple[list[Float32], float]:
        first, second = values
        # Only the lower of the two values counts, so only its critic is asked for a slope.
        first_is_lower = first <= second
        share = np.float32(-1.0 / count)
        slopes = [first_is_lower * share, ~first_is_lower * share]
        return slopes, float(np.minimum(first, second).sum(dtype=np.float64))


class Quantiles:
    """As many quantiles of the return from each critic; the highest of all are not learned from.

    They are learned by the Huber loss of quantiles, and an action is worth the mean of all
    (TQC; Kuznetsov et al., 2020). What a critic is off by is told of its mean.
    """

    def __init__(self, outputs: int, dropped: int) -> None:
        self.outputs = outputs
        self._dropped = dropped
        #: Each output stands for the middle of an equal share of the probability.
        self._fractions = [(2 * place + 1) / (2 * outputs) for place in range(outputs)]

    def lowest(self, values: Float32) -> Float32:
        kept = len(values) * (self.outputs - self._dropped)
        # Sorted where a row's lie side by side, and laid out as the values are again.
        together = np.concatenate([value.T for value in values], axis=1)
        together.sort(axis=1)
        # What is not finite has been put last, where it would be left out unseen.
        together[~np.isfinite(together[:, -1])] = np.nan
        return np.ascontiguousarray(together[:, :kept].T)

    def error(self, values: Float32, wanted: Float32, count: int) -> tuple[Float32, float]:
        slope: Float32 = np.empty_like(values)
        apart: Float32 = np.empty_like(wanted)
        # numpy compares two arrays faster than an array and a row.
        low, none, high = (np.full_like(wanted, bound) for bound in (-1.0, 0.0, 1.0))
        for place, fraction in enumerate(self._fractions):
            np.subtract(wanted, values[place], out=apart)
            np.minimum(apart, high, out=apart)
            np.maximum(apart, low, out=apart)
            both = np.add.reduce(apart, axis=0)
            np.minimum(apart, none, out=apart)
            below = np.add.reduce(apart, axis=0)
            # Too high counts by 1 - fraction, too low by the fraction; at 0 both are nothing.
            both *= np.float32(fraction)
            below *= np.float32(1.0 - 2.0 * fraction)
            np.add(both, below, out=slope[place])
        slope *= np.float32(-1.0 / (len(wanted) * len(values) * count))
        off = values.mean(axis=0) - wanted.mean(axis=0)
        return slope, float(np.dot(off, off))

    def slopes(self, values: Float32, count: int) -> tuple[list[Float32], float]:
        share = 1.0 / (len(values) * self.outputs)
        slopes = [np.full_like(value, -share / count) for value in values]
        return slopes, share * sum(float(value.sum(dtype=np.float64)) for value in values)


def worth_of(quantiles: int, dropped: int) -> Worth:
    return Lower() if quantiles == 1 else Quantiles(quantiles, dropped)
