"""The contract of several learners: one program on each, and what passes between them.

Every learner holds the same weights and the same batch and does the same arithmetic; only the
gradients of a minibatch's shards are computed by one each, and gathered. Rank 0 alone has a fleet,
files and a display. Must not know: processes, sockets, algorithms.
"""

from __future__ import annotations

from typing import Any, Protocol

from rlflame.rollout.spec import Float32


class ProcessGroup(Protocol):
    """The learners of one run; all call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, values: Float32) -> Float32:
        """Everybody's array, all of one shape, stacked by rank; valid until the next call."""

    def use_device(self, device: str) -> None:
        """From now on gather where gradients are made, if that is possible: `device` of here."""

    def broadcast(self, value: Any) -> Any:
        """What rank 0 gives, for everybody: a value that `wire` can carry. The others give None,
        and wait for as long as it takes."""


class SingleProcessGroup:
    """The one learner of a run that asks for no more."""

    rank = 0
    size = 1

    def gather(self, values: Float32) -> Float32:
        return values[None]

    def use_device(self, device: str) -> None:
        """There is nobody to meet."""

    def broadcast(self, value: Any) -> Any:
        return value
