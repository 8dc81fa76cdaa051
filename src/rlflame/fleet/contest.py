"""Whose turn an iteration is while two fleets are timed, and which of them is the faster.

The home side begins, until the other side is ready. What a side does first after the other has
worked is not counted: its workers have to come, and to restore the environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

FleetSide = Literal["home", "away"]
FLEET_SIDES: tuple[FleetSide, FleetSide] = ("home", "away")
#: Iterations in which all workers of the away side have to come.
_MAX_WARMUP_ITERATIONS = 4
#: A factor that is enough after one timed iteration on each side.
_CLEAR_FACTOR = 2.0
#: A factor that counts as no difference after more iterations.
_TIE_FACTOR = 1.05
_EXTRA_ITERATIONS = 2
#: Iterations during which something else ran as well, before those count too.
_MAX_SHARED_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One iteration: which side runs it, and whether it is timed."""

    side: FleetSide
    is_timed: bool


@dataclass(frozen=True, slots=True)
class ContestResult:
    """Medians in steps a second, and the numbers of iterations behind them."""

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
    """Takes at most thirteen iterations once the away side is ready, and a few more where something
    else runs at the same time.

    `is_ready`: whether the away side can begin at once; `is_complete`: whether all its workers are
    there. Both are called between two iterations.
    """

    def __init__(self, is_ready: Callable[[], bool], is_complete: Callable[[], bool]) -> None:
        self._is_ready, self._is_complete = is_ready, is_complete
        self._rates: dict[FleetSide, list[float]] = {"home": [], "away": []}
        self._shared_rates: dict[FleetSide, list[float]] = {"home": [], "away": []}
        self._remaining_turns = self._generate_turns()

    def take_turn(self) -> Turn | None:
        """The turn of the next iteration; None once there is a result."""
        return next(self._remaining_turns, None)

    def add_rate(self, side: FleetSide, steps_per_s: float, *, exclusive: bool) -> None:
        """A timed iteration; `exclusive`: whether nothing else ran meanwhile."""
        (self._rates if exclusive else self._shared_rates)[side].append(steps_per_s)

    def make_result(self) -> ContestResult | None:
        """None where the sides were not timed under one condition."""
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
        """`count` turns during which nothing else runs, if that does not take too long."""
        target = len(self._rates[side]) + count
        for _ in range(count + _MAX_SHARED_ITERATIONS):
            if len(self._rates[side]) >= target:
                return
            yield Turn(side, is_timed=True)
