"""The policy that is scored and kept, where that is not the newest one alone.

Late in training a policy often moves to and fro around a good one, and single versions fall where
their mean does not. Must not know: algorithms, the loop, what acts in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlflame.rollout.spec import Array, PolicyArrays

from . import State
from .parameters import restore, restored_count

#: Observations are normalised as the newest policy does it: weights are averaged, statistics not.
_STATISTICS = "normaliser."


class PolicyAverage:
    """Weights averaged over about so many versions; without a number, the newest are handed back.

    Each version counts the same until there are as many, and from then on what went before fades
    by one part in that number with each.
    """

    def __init__(self, versions: int | None) -> None:
        self._versions = versions
        self._count = 0
        self._mean: PolicyArrays = {}

    def follow(self, newest: PolicyArrays) -> None:
        """Take in one more version."""
        if self._versions is None:
            return
        if not self._count:
            self._mean = _copied(_weights(newest))
        self._count = min(self._count + 1, self._versions)
        part = np.float32(1.0 / self._count)
        for name, mean in self._mean.items():
            mean += (newest[name] - mean) * part

    def policy(self, newest: PolicyArrays) -> PolicyArrays:
        """The average; the newest where there is none."""
        return {**newest, **_copied(self._mean)}

    def state(self) -> State:
        if self._versions is None:
            return {}
        return {"count": np.array(self._count, np.int64), **_copied(self._mean)}

    def load_state(self, state: Mapping[str, Array], newest: PolicyArrays) -> None:
        """Stand where the state does; `newest` says which weights there are."""
        if self._versions is None:
            return
        self._count = restored_count("count", state)
        self._mean = _copied(_weights(newest)) if self._count else {}
        for name, mean in self._mean.items():
            restore(mean, name, state)


def _weights(policy: PolicyArrays) -> PolicyArrays:
    return {n: array for n, array in policy.items() if not n.startswith(_STATISTICS)}


def _copied(arrays: PolicyArrays) -> PolicyArrays:
    return {name: array.copy() for name, array in arrays.items()}
