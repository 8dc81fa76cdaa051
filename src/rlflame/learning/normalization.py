"""Running means and variances in float64, merged in a fixed order.

Must not know: what the numbers measure, beyond being observations or returns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlflame.errors import LearningError
from rlflame.rollout.spec import Array, Float32, Float64

from .networks.flat_params import restore

_EPSILON = 1e-8
TOO_LARGE_REWARDS = (
    "divide the environment's rewards, "
    "for example by a gymnasium.wrappers.TransformReward around it"
)


class RunningMoments:
    """Count, mean and sum of squared deviations of each component."""

    def __init__(self, size: int) -> None:
        self.count = 0.0
        self.mean: Float64 = np.zeros(size, np.float64)
        self.squares: Float64 = np.zeros(size, np.float64)

    def merge(self, samples: Array) -> None:
        """Take in `[n, size]` samples (Chan, Golub and LeVeque, 1979)."""
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
        self.count = total

    def compute_variance(self) -> Float64:
        return self.squares / self.count if self.count else np.ones_like(self.squares)

    def get_state(self, prefix: str) -> dict[str, Array]:
        return {
            f"{prefix}.count": np.array(self.count, np.float64),
            f"{prefix}.mean": self.mean.copy(),
            f"{prefix}.squares": self.squares.copy(),
        }

    def load_state(self, prefix: str, state: Mapping[str, Array]) -> None:
        count = np.zeros((), np.float64)
        restore(count, f"{prefix}.count", state)
        self.count = float(count)
        restore(self.mean, f"{prefix}.mean", state)
        restore(self.squares, f"{prefix}.squares", state)


class ObservationNormaliser:
    """Moments of raw observations; what is shipped is a float32 mean and scale."""

    def __init__(self, size: int) -> None:
        self._moments = RunningMoments(size)

    def merge(self, observations: Float32, valid: NDArray[np.bool_]) -> None:
        """Take in `[T, columns, size]` observations, where they are valid."""
        self._moments.merge(observations[valid])

    def make_arrays(self) -> dict[str, Array]:
        scale = 1.0 / np.sqrt(self._moments.compute_variance() + _EPSILON)
        return {
            "normaliser.mean": self._moments.mean.astype(np.float32),
            "normaliser.scale": scale.astype(np.float32),
        }

    def get_state(self) -> dict[str, Array]:
        return self._moments.get_state("normaliser")

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._moments.load_state("normaliser", state)


class RewardScaler:
    """Divides rewards by the running standard deviation of the discounted return."""

    def __init__(self, columns: int, discount: float) -> None:
        self._moments = RunningMoments(1)
        self._running: Float64 = np.zeros(columns, np.float64)
        self._discount = discount

    def scale(self, rewards: Float64, ended: NDArray[np.bool_], valid: NDArray[np.bool_]) -> float:
        """Take in the rewards of all columns' next steps; the factor for all of them."""
        returns = np.empty_like(rewards)
        for t in range(len(rewards)):
            self._running = self._discount * self._running + rewards[t]
            returns[t] = self._running
            self._running = np.where(ended[t], 0.0, self._running)
        with np.errstate(over="ignore", invalid="ignore"):
            self._moments.merge(returns[valid][:, None])
        if not np.isfinite(self._moments.compute_variance()[0]):
            raise LearningError(
                f"Rewards as large as {np.abs(rewards).max():.3g} have no variance that a number "
                "can hold.",
                TOO_LARGE_REWARDS,
            )
        return float(1.0 / np.sqrt(self._moments.compute_variance()[0] + _EPSILON))

    def get_state(self) -> dict[str, Array]:
        return {
            **self._moments.get_state("reward_scaler"),
            "reward_scaler.running": self._running.copy(),
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._moments.load_state("reward_scaler", state)
        restore(self._running, "reward_scaler.running", state)
