"""The policy that is scored and kept, where that is not the newest one alone.

Late in training a policy often moves to and fro around a good one, and single versions fall where
their mean does not.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlflame.rollout.task import Array, Float64, PolicyArrays

from .base import State, StateParts, restore_count

#: About the part of all versions so far that an average is of at most.
_SHARE = 1.0 / 20.0
#: Observations are normalised as the newest policy does it: weights are averaged, statistics not.
_STATISTICS = "normaliser."


class PolicyAverage:
    """Weights averaged over about so many versions; without a number, the newest are handed back.

    What went before fades by one part in that number with each version, and early in training,
    where old versions are much worse, by twenty parts in the number of versions so far. An
    iteration that changed no weight made no version.
    """

    def __init__(self, versions: int | None, newest: PolicyArrays) -> None:
        self._versions = versions
        self._count = 0
        self._last = _copy_weights(newest)
        #: Wider than the weights: over many versions, what one adds is below their last bit.
        self._mean: dict[str, Float64] = {}

    def update(self, newest: PolicyArrays) -> None:
        """Take in one more version, if it is one."""
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
        """The average; the newest where there is none."""
        return {**newest, **{name: mean.astype(np.float32) for name, mean in self._mean.items()}}

    def get_state(self) -> State:
        if self._versions is None:
            return {}
        return {"versions": np.array(self._count, np.int64), **StateParts(**self._mean).get_state()}

    def load_state(self, state: Mapping[str, Array], newest: PolicyArrays) -> None:
        """Stand where the state does, after the newest version."""
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
