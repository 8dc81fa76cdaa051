"""The average of recent policies, evaluated and saved in place of the latest one.

Late in training, the weights often oscillate, and individual versions score lower than the policy
with the average weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlflame.rollout.task import Array, Float64, PolicyArrays

from .base import State, StateParts, restore_count

#: The average covers at most about this fraction of all versions so far.
_SHARE = 1.0 / 20.0
#: Only weights are averaged. The normaliser comes from the latest policy.
_STATISTICS = "normaliser."


class PolicyAverage:
    """A moving average of the weights over about `versions` policy versions.

    A new version makes up the fraction 1 / `versions` of the average. Early in training, when old
    versions are much worse, it makes up 20 / (versions so far), at most 1. An iteration that
    changes no weight adds no version. If `versions` is None, there is no average.
    """

    def __init__(self, versions: int | None, newest: PolicyArrays) -> None:
        self._versions = versions
        self._count = 0
        self._last = _copy_weights(newest)
        #: float64, because a single version may change the mean by less than float32's precision.
        self._mean: dict[str, Float64] = {}

    def update(self, newest: PolicyArrays) -> None:
        """Add `newest` to the average if its weights have changed."""
        if self._versions is None:
            return
        weights, last = _copy_weights(newest), self._last
        if all(np.array_equal(array, last[name]) for name, array in weights.items()):
            return
        self._last = weights
        if not self._count:
            self._mean = {name: np.zeros(a.shape, np.float64) for name, a in weights.items()}
        self._count += 1
        length = min(self._versions, _SHARE * self._count)
        for name, mean in self._mean.items():
            if length <= 1.0:
                mean[:] = weights[name]
            else:
                mean += (weights[name] - mean) / length

    def get_policy(self, newest: PolicyArrays) -> PolicyArrays:
        """Return the policy with averaged weights, or `newest` if there is no average."""
        return {**newest, **{name: mean.astype(np.float32) for name, mean in self._mean.items()}}

    def get_state(self) -> State:
        if self._versions is None:
            return {}
        return {"versions": np.array(self._count, np.int64), **StateParts(**self._mean).get_state()}

    def load_state(self, state: Mapping[str, Array], newest: PolicyArrays) -> None:
        """Restore a saved average; `newest` is the policy that was saved with it."""
        self._last = _copy_weights(newest)
        if self._versions is None:
            return
        self._count = restore_count("versions", state)
        self._mean = {
            name: np.zeros(a.shape, np.float64) for name, a in self._last.items() if self._count
        }
        StateParts(**self._mean).load_state(state)


def _copy_weights(policy: PolicyArrays) -> PolicyArrays:
    return {n: array.copy() for n, array in policy.items() if not n.startswith(_STATISTICS)}
