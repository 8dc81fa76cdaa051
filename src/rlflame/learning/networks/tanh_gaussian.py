"""The squashed Gaussian as a learner needs it: samples forward, and their gradient backward.

Laid out `[units, rows]` like `kernel`. The noise is given, so that an action is a differentiable
function of the network's outputs (Kingma and Welling, 2014). Must not know: networks, losses.
"""

from __future__ import annotations

import math

import numpy as np

from rlflame.rollout.distributions import LOG_STD_HIGH, LOG_STD_LOW, log_slope_of_tanh
from rlflame.rollout.spec import Float32

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_FLOAT_ONE = np.float32(1.0)


class SquashedGaussianHead:
    """a = tanh(mean + std * noise); the latest sample is what `backward` differentiates."""

    def __init__(
        self, action_size: int, lowest: float = LOG_STD_LOW, highest: float = LOG_STD_HIGH
    ) -> None:
        self._size = action_size
        self._lowest, self._highest = lowest, highest
        empty: Float32 = np.empty((action_size, 0), np.float32)
        self._actions = self._scaled_noise = self._raw_log_std = empty

    def sample(self, out: Float32, noise: Float32) -> tuple[Float32, Float32]:
        """Actions `[action, rows]` and the log-density of each row's."""
        size = self._size
        self._raw_log_std = out[size:]
        log_std: Float32 = np.maximum(self._raw_log_std, self._lowest)
        np.minimum(log_std, self._highest, out=log_std)
        self._scaled_noise = np.exp(log_std)
        self._scaled_noise *= noise
        raw: Float32 = out[:size] + self._scaled_noise
        density = noise * noise
        density *= np.float32(-0.5)
        density -= log_std
        density -= log_slope_of_tanh(raw)
        log_probs: Float32 = np.add.reduce(density, axis=0)
        log_probs -= np.float32(size * _HALF_LOG_TWO_PI)
        self._actions = np.tanh(raw, out=raw)
        return self._actions, log_probs

    def backward(self, d_actions: Float32, d_log_prob: float) -> tuple[Float32, Float32 | None]:
        """d(loss)/d(output), given d(loss)/d(action) of each row and the d(loss)/d(log_prob)
        that all rows share; and nothing beside it for the units below."""
        actions, size = self._actions, self._size
        upstream: Float32 = np.empty((2 * size, actions.shape[1]), np.float32)
        d_raw, d_log_std = upstream[:size], upstream[size:]
        # The action's slope is 1 - a^2, that of its log-density in the same direction 2 a.
        np.multiply(actions, actions, out=d_raw)
        np.subtract(_FLOAT_ONE, d_raw, out=d_raw)
        d_raw *= d_actions
        d_raw += actions * np.float32(2.0 * d_log_prob)
        np.multiply(d_raw, self._scaled_noise, out=d_log_std)
        d_log_std -= np.float32(d_log_prob)
        raw = self._raw_log_std
        d_log_std *= (raw >= self._lowest) & (raw <= self._highest)
        return upstream, None
