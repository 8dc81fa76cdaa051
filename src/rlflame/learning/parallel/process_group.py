"""The contract of several learners: one program on each, and what passes between them.

Every learner holds the same weights and the same batch and does the same arithmetic; only the
gradients of a minibatch's shards are computed by one each, and gathered. Rank 0 alone has a fleet,
files and a display. Must not know: processes, sockets, algorithms.
"""

from __future__ import annotations

from typing import Any, Protocol

from rlflame.rollout.spec import Float32


class Group(Protocol):
    """The learners of one run; all call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, mine: Float32) -> Float32:
        """Everybody's array, all of one shape, stacked by rank; valid until the next call."""

    def meet_on(self, device: str) -> None:
        """From now on gather where gradients are made, if that is possible: `device` of here."""

    def share(self, value: Any) -> Any:
        """What rank 0 gives, for everybody: a value that `wire` can carry. The others give None,
        and wait for as long as it takes."""


class Alone:
    """The one learner of a run that asks for no more."""

    rank = 0
    size = 1

    def gather(self, mine: Float32) -> Float32:
        return mine[None]

    def meet_on(self, device: str) -> None:
        """There is nobody to meet."""

    def share(self, value: Any) -> Any:
        return value
