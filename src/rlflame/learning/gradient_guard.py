"""Refuses gradients that are not finite, so that no weight becomes NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from rlflame.errors import LearningError
from rlflame.rollout.spec import Array

from .base import Metrics
from .networks.flat_params import restore
from .normalization import TOO_LARGE_REWARDS

#: Squares of what is larger leave float32 too little room for sums over a batch.
_LARGE = 1e15


class GradientGuard:
    """Keeps NaN and infinity out of the weights: counts refusals, and raises after several."""

    limit = 5
    #: What to do where that which is learned from, rather than the weights, has grown too large.
    remedies: Mapping[str, str] = {
        **dict.fromkeys(
            ("observations", "next_observations"), "--set network.normalise_observations=true"
        ),
        "returns": "--set ppo.scale_rewards=true",
        "rewards": TOO_LARGE_REWARDS,
    }

    def __init__(self, section: str) -> None:
        self.refused_count = 0
        self._consecutive_count = 0
        self._section = section

    def is_refused(self, norm: float, sums: Metrics, **inputs: Array) -> bool:
        """Whether this norm, or one of the sums that came with it, is not finite."""
        if math.isfinite(norm) and all(math.isfinite(value) for value in sums.values()):
            self._consecutive_count = 0
            return False
        self.refused_count += 1
        self._consecutive_count += 1
        if self._consecutive_count >= self.limit:
            raise self._make_error(norm, inputs)
        return True

    def _make_error(self, norm: float, inputs: Mapping[str, Array]) -> LearningError:
        largest = {name: float(np.abs(array).max()) for name, array in inputs.items()}
        name = max(largest, key=largest.__getitem__)
        is_too_large = largest[name] > _LARGE
        suffix = f", with {name.replace('_', ' ')} of {largest[name]:.3g}" if is_too_large else ""
        advice = (
            f"try a smaller learning rate, for example --set {self._section}.learning_rate=1e-4"
        )
        return LearningError(
            f"The loss or its gradient was not finite {self._consecutive_count} times in a row "
            f"(gradient norm {norm}{suffix}); the weights were left as they were.",
            self.remedies[name] if is_too_large else advice,
        )

    def get_state(self, name: str = "guard") -> dict[str, Array]:
        return {name: np.array([self.refused_count, self._consecutive_count], np.int64)}

    def load_state(self, state: Mapping[str, Array], name: str = "guard") -> None:
        counts = np.zeros(2, np.int64)
        restore(counts, name, state)
        self.refused_count, self._consecutive_count = (int(count) for count in counts)
