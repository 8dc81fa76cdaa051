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

FleetSide = Literal["home", "away"]
FLEET_SIDES: tuple[FleetSide, FleetSide] = ("home", "away")
#: Iterations that all of the away side's workers have to come in.
_MAX_WARMUP_ITERATIONS = 4
#: So much faster after one look each is enough...
_CLEAR_FACTOR = 2.0
#: ...and after more looks, so little is no difference.
_TIE_FACTOR = 1.05
_EXTRA_ITERATIONS = 2
#: Iterations in vain, because something else ran as well, before those count too.
_MAX_SHARED_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One iteration: who runs it, and whether its time is to be told."""

    side: FleetSide
    is_timed: bool


@dataclass(frozen=True, slots=True)
class ContestResult:
    """Medians of what was seen, in steps a second, and of how many iterations."""

    winner: FleetSide
    steps_per_s: dict[FleetSide, float]
    iterations: dict[FleetSide, int]

    @property
    def factor(self) -> float:
        slow, fast = sorted(self.steps_per_s.values())
        return fast / slow if slow > 0.0 else float("inf")

    @property
    def is_tie(self) -> bool:
        return self.factor <= _TIE_FACTOR


class Contest:
    """`ready` says whether the away side can begin at once, `complete` whether all of it is there.

    Either is asked between two iterations. At most thirteen that are not over yet when the away
    side is ready are part of it, and a few more where something else ran at the same time.
    """

    def __init__(self, is_ready: Callable[[], bool], is_complete: Callable[[], bool]) -> None:
        self._is_ready, self._is_complete = is_ready, is_complete
        self._rates: dict[FleetSide, list[float]] = {"home": [], "away": []}
        self._shared_rates: dict[FleetSide, list[float]] = {"home": [], "away": []}
        self._remaining_turns = self._generate_turns()

    def take_turn(self) -> Turn | None:
        """Of the next iteration; None once there is a verdict."""
        return next(self._remaining_turns, None)

    def add_rate(self, side: FleetSide, steps_per_s: float, *, exclusive: bool) -> None:
        """An iteration that counts; `alone` says whether nothing else ran meanwhile."""
        (self._rates if exclusive else self._shared_rates)[side].append(steps_per_s)

    def make_result(self) -> ContestResult | None:
        """None where the sides have not been seen under one condition."""
        rates = self._rates if all(self._rates.values()) else self._shared_rates
        if not all(rates.values()):
            return None
        medians = {side: median(rates[side]) for side in FLEET_SIDES}
        winner: FleetSide = "away" if medians["away"] > _TIE_FACTOR * medians["home"] else "home"
        return ContestResult(winner, medians, {side: len(rates[side]) for side in FLEET_SIDES})

    def _generate_turns(self) -> Iterator[Turn]:
        yield Turn("home", is_timed=False)
        while not self._is_ready():
            yield Turn("home", is_timed=False)
        for _ in range(_MAX_WARMUP_ITERATIONS):
            yield Turn("away", is_timed=False)
            if self._is_complete():
                break
        yield from self._generate_timed_turns("away", 1)
        yield Turn("home", is_timed=False)
        yield from self._generate_timed_turns("home", 1)
        interim_result = self.make_result()
        if interim_result is None or interim_result.factor < _CLEAR_FACTOR:
            yield from self._generate_timed_turns("home", _EXTRA_ITERATIONS)
            yield Turn("away", is_timed=False)
            yield from self._generate_timed_turns("away", _EXTRA_ITERATIONS)

    def _generate_timed_turns(self, side: FleetSide, count: int) -> Iterator[Turn]:
        """So many that were alone, if it does not take too long."""
        target = len(self._rates[side]) + count
        for _ in range(count + _MAX_SHARED_ITERATIONS):
            if len(self._rates[side]) >= target:
                return
            yield Turn(side, is_timed=True)
