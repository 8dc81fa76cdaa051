"""Running statistics that normalise observations and scale rewards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlflame.errors import LearningError
from rlflame.rollout.task import Array, Float64, PolicyArrays, PolicySpec

from .base import StateParts
from .networks.flat_vector import FlatVector

_EPSILON = 1e-8
SCALE_HINT = (
    "scale them down in the environment, or set network.normalise_observations or ppo.scale_rewards"
)


class RunningMoments:
    """Tracks the count, the mean and the sum of squared deviations of each component."""

    def __init__(self, size: int) -> None:
        self.count: Float64 = np.zeros((), np.float64)
        self.mean: Float64 = np.zeros(size, np.float64)
        self.squares: Float64 = np.zeros(size, np.float64)
        self.state = StateParts(count=self.count, mean=self.mean, squares=self.squares)

    def merge(self, samples: Array) -> None:
        """Merge the moments of `[n, size]` samples (Chan, Golub and LeVeque, 1979)."""
        count = len(samples)
        if count == 0:
            return
        wide = np.asarray(samples, np.float64)
        mean = wide.mean(axis=0)
        squares = np.square(wide - mean).sum(axis=0)
        total = self.count + count
        delta = mean - self.mean
        self.squares += squares + np.square(delta) * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count[...] = total

    def compute_variance(self) -> Float64:
        return self.squares / self.count if self.count else np.ones_like(self.squares)


class ObservationNormaliser(RunningMoments):
    """Tracks raw observations; `make_arrays` returns their mean and scale.

    The observations in `choice_spans` keep their values: their mean is 0, and their scale 1.
    """

    def __init__(self, size: int, choice_spans: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(size)
        self._size, self._spans = size, choice_spans

    def merge(self, samples: Array) -> None:
        """Merge the moments of rows; any mask at their ends is ignored."""
        super().merge(samples[:, : self._size])

    def make_arrays(self) -> PolicyArrays:
        mean = self.mean.astype(np.float32)
        scale = (1.0 / np.sqrt(self.compute_variance() + _EPSILON)).astype(np.float32)
        for start, end in self._spans:
            mean[start:end], scale[start:end] = 0.0, 1.0
        return {"normaliser.mean": mean, "normaliser.scale": scale}


def make_normaliser(spec: PolicySpec) -> ObservationNormaliser | None:
    """Return a new normaliser, or None if the policy does not normalise observations."""
    if not spec.normalise:
        return None
    return ObservationNormaliser(spec.observation_size, spec.choice_spans)


def make_policy(actor: FlatVector, normaliser: ObservationNormaliser | None) -> PolicyArrays:
    """Return copies of the arrays of the actor and of the normaliser, if any."""
    arrays = actor.copy_views("actor.")
    return arrays if normaliser is None else {**arrays, **normaliser.make_arrays()}


class RewardScaler:
    """Computes a scale for rewards from the variance of the discounted return."""

    def __init__(self, columns: int, discount: float) -> None:
        self._moments = moments = RunningMoments(1)
        self._running: Float64 = np.zeros(columns, np.float64)
        self._discount = discount
        self.state = StateParts(
            count=moments.count, mean=moments.mean, squares=moments.squares, running=self._running
        )

    def scale(self, rewards: Float64, ends: NDArray[np.bool_], valid: NDArray[np.bool_]) -> float:
        """Add the next rewards of all columns; return the factor for scaling them."""
        returns = np.empty_like(rewards)
        for t in range(len(rewards)):
            returns[t] = self._discount * self._running + rewards[t]
            self._running[:] = np.where(ends[t], 0.0, returns[t])
        with np.errstate(over="ignore", invalid="ignore"):
            self._moments.merge(returns[valid][:, None])
        if not np.isfinite(self._moments.compute_variance()[0]):
            raise LearningError(
                "The variance of the discounted return overflows; the largest reward is "
                f"{np.abs(rewards).max():.3g}.",
                "scale the rewards down in the environment",
            )
        return float(1.0 / np.sqrt(self._moments.compute_variance()[0] + _EPSILON))
