"""State-dependent exploration (gsde) as a learner needs it: variances forward, gradients backward.

Laid out `[units, rows]` like `kernel`. The noise that acted is a matrix that several steps share;
what one step's loss asks for is how it is distributed in that step, which is a normal of variance
std^2 latent^2 in each action. Must not know: networks, losses, which matrix it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlflame.rollout.distributions import VARIANCE_FLOOR
from rlflame.rollout.spec import Array, Float32

from .tanh_gaussian import SquashedGaussianHead

_LOG_TWO_PI = math.log(2.0 * math.pi)
_HALF, _FLOAT_ONE, _TWO = np.float32(0.5), np.float32(1.0), np.float32(2.0)


class GsdeVariance:
    """The variance of each action in each row, and the way back from it."""

    def __init__(
        self, latent: Callable[[], Float32], log_std: Float32, log_std_gradient: Float32
    ) -> None:
        self._latent = latent
        self._log_std = log_std
        self._gradient = log_std_gradient
        self._variances: Float32 = np.empty_like(log_std)
        self._units = self._squares = self._total = self._upstream = self._variances

    def log_variance(self) -> Float32:
        """`[action, rows]`, of the latest forward pass."""
        np.exp(self._log_std * _TWO, out=self._variances)
        self._units = self._latent()
        self._squares = self._units * self._units
        self._total = self._variances.T @ self._squares
        self._total += np.float32(VARIANCE_FLOOR)
        result: Float32 = np.log(self._total)
        return result

    def backward(self, d_log_variance: Float32) -> None:
        """Write the gradient of the log deviations."""
        self._upstream = d_log_variance / self._total
        np.matmul(self._squares, self._upstream.T, out=self._gradient)
        self._gradient *= self._variances
        self._gradient *= _TWO

    def compute_latent_gradient(self) -> Float32:
        """d(loss)/d(latent), after `backward`, for whoever lets the variance shape the network."""
        result: Float32 = self._variances @ self._upstream
        result *= self._units
        result *= _TWO
        return result


class GsdeHead:
    """The log-density of given actions; the network below does not answer for the variance.

    Otherwise it could make actions likelier by making its units larger (Raffin et al., 2020).
    """

    def __init__(self, variance: GsdeVariance) -> None:
        self._variance = variance
        self._z: Float32 = np.empty((0, 0), np.float32)
        self._inverse = self._log_variance = self._z

    def log_prob(self, out: Float32, actions: Array) -> Float32:
        self._log_variance = self._variance.log_variance()
        self._inverse = np.exp(self._log_variance * -_HALF)
        self._z = actions.T - out
        self._z *= self._inverse
        density = self._z * self._z
        density += self._log_variance
        result: Float32 = np.add.reduce(density, axis=0)
        result += np.float32(len(density) * _LOG_TWO_PI)
        result *= -_HALF
        return result

    def sum_entropy(self) -> float:
        constant = self._log_variance.size * (1.0 + _LOG_TWO_PI)
        return 0.5 * (float(self._log_variance.sum()) + constant)

    def backward(self, d_log_prob: Float32, d_entropy: float) -> Float32:
        d_log_variance = self._z * self._z
        d_log_variance -= _FLOAT_ONE
        d_log_variance *= d_log_prob
        d_log_variance += np.float32(d_entropy)
        d_log_variance *= _HALF
        self._variance.backward(d_log_variance)
        weighted = self._z * d_log_prob
        weighted *= self._inverse
        return weighted


class SquashedGsdeHead:
    """Squashed samples of that variance, which the network below answers for too."""

    def __init__(self, action_size: int, variance: GsdeVariance) -> None:
        self._size = action_size
        self._variance = variance
        self._head = SquashedGaussianHead(action_size, -math.inf, math.inf)

    def sample(self, out: Float32, noise: Float32) -> tuple[Float32, Float32]:
        return self._head.sample(
            np.concatenate([out, self._variance.log_variance() * _HALF]), noise
        )

    def backward(self, d_actions: Float32, d_log_prob: float) -> tuple[Float32, Float32 | None]:
        upstream, _ = self._head.backward(d_actions, d_log_prob)
        self._variance.backward(upstream[self._size :] * _HALF)
        return upstream[: self._size], self._variance.compute_latent_gradient()
