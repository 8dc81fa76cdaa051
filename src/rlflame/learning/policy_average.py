"""An average of policy versions, used in place of the newest policy.

Late in training, a policy often oscillates around a good one, and single versions score below their
average.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlflame.rollout.task import Array, Float64, PolicyArrays

from .base import State, StateParts, restore_count

#: The largest average covers about this fraction of all versions so far.
_SHARE = 1.0 / 20.0
#: Only weights are averaged. The normaliser is that of the newest policy.
_STATISTICS = "normaliser."


class PolicyAverage:
    """An average over about this many versions; without a number, the newest.

    Each version reduces the weight of earlier ones by 1 / number, and by 20 / (versions so far)
    early in training, when old versions are much worse. An iteration that changes no weight makes
    no version.
    """

    def __init__(self, versions: int | None, newest: PolicyArrays) -> None:
        self._versions = versions
        self._count = 0
        self._last = _copy_weights(newest)
        #: float64: over many versions, the addition of one is smaller than float32's precision.
        self._mean: dict[str, Float64] = {}

    def update(self, newest: PolicyArrays) -> None:
        """Add a version if the weights have changed."""
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
        """Return the average, or the newest policy if there is none."""
        return {**newest, **{name: mean.astype(np.float32) for name, mean in self._mean.items()}}

    def get_state(self) -> State:
        if self._versions is None:
            return {}
        return {"versions": np.array(self._count, np.int64), **StateParts(**self._mean).get_state()}

    def load_state(self, state: Mapping[str, Array], newest: PolicyArrays) -> None:
        """Restore the state that was saved after the newest version."""
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
