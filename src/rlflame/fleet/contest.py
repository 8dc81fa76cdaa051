"""Whose turn an iteration is while two fleets are timed, and which of them is the faster.

Begins at home, where nothing has to be waited for, until the other side is ready. What a side does
first after the other has worked is not counted: its workers have to come, and to take environments
up where the other has left them. Must not know: tasks, clocks, what a fleet is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

Side = Literal["home", "away"]
SIDES: tuple[Side, Side] = ("home", "away")
#: Iterations that all of the away side's workers have to come in.
_MOST_WARM = 4
#: So much faster after one look each is enough...
_CLEAR = 2.0
#: ...and after more looks, so little is no difference.
_EQUAL = 1.05
_MORE = 2
#: Iterations in vain, because something else ran as well, before those count too.
_IN_VAIN = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One iteration: who runs it, and whether its time is to be told."""

    side: Side
    counts: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Medians of what was seen, in steps a second, and of how many iterations."""

    winner: Side
    steps_per_s: dict[Side, float]
    seen: dict[Side, int]

    @property
    def factor(self) -> float:
        slow, fast = sorted(self.steps_per_s.values())
        return fast / slow if slow > 0.0 else float("inf")

    @property
    def equal(self) -> bool:
        return self.factor <= _EQUAL


class Trial:
    """`ready` says whether the away side can begin at once, `complete` whether all of it is there.

    Either is asked between two iterations. At most thirteen that are not over yet when the away
    side is ready are part of it, and a few more where something else ran at the same time.
    """

    def __init__(self, ready: Callable[[], bool], complete: Callable[[], bool]) -> None:
        self._ready, self._complete = ready, complete
        self._rates: dict[Side, list[float]] = {"home": [], "away": []}
        self._shared: dict[Side, list[float]] = {"home": [], "away": []}
        self._course = self._turns()

    def turn(self) -> Turn | None:
        """Of the next iteration; None once there is a verdict."""
        return next(self._course, None)

    def saw(self, side: Side, steps_per_s: float, *, alone: bool) -> None:
        """An iteration that counts; `alone` says whether nothing else ran meanwhile."""
        (self._rates if alone else self._shared)[side].append(steps_per_s)

    def verdict(self) -> Verdict | None:
        """None where the sides have not been seen under one condition."""
        rates = self._rates if all(self._rates.values()) else self._shared
        if not all(rates.values()):
            return None
        found = {side: median(rates[side]) for side in SIDES}
        winner: Side = "away" if found["away"] > _EQUAL * found["home"] else "home"
        return Verdict(winner, found, {side: len(rates[side]) for side in SIDES})

    def _turns(self) -> Iterator[Turn]:
        yield Turn("home", counts=False)
        while not self._ready():
            yield Turn("home", counts=False)
        for _ in range(_MOST_WARM):
            yield Turn("away", counts=False)
            if self._complete():
                break
        yield from self._timed("away", 1)
        yield Turn("home", counts=False)
        yield from self._timed("home", 1)
        so_far = self.verdict()
        if so_far is None or so_far.factor < _CLEAR:
            yield from self._timed("home", _MORE)
            yield Turn("away", counts=False)
            yield from self._timed("away", _MORE)

    def _timed(self, side: Side, more: int) -> Iterator[Turn]:
        """So many that were alone, if it does not take too long."""
        wanted = len(self._rates[side]) + more
        for _ in range(more + _IN_VAIN):
            if len(self._rates[side]) >= wanted:
                return
            yield Turn(side, counts=True)
