"""A fleet over two: both work in turn until it is known which is faster, then that one alone.

Whole iterations of training are timed, from their submission to the last of their fragments: what
counts is how long a run waits. A fragment is the same wherever it comes from, and so is the run.
What a side does first after the other has worked is not counted: its workers have to come, and to
restore the environments. The loser is closed as soon as nothing runs there any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

from rlflame.errors import FleetError
from rlflame.rollout.task import Fragment, PolicyArrays, RolloutTask

from .base import (
    ContextManagerMixin,
    Fleet,
    FleetEvent,
    FleetReport,
    Observer,
    Submission,
    Traffic,
    ignore_event,
    make_policy_id,
)

FleetSide = Literal["home", "away"]
_SIDES: tuple[FleetSide, FleetSide] = ("home", "away")
#: Iterations in which all workers of the away side have to come.
_MAX_WARMUP_ITERATIONS = 4
#: A factor that is enough after one timed iteration on each side.
_CLEAR_FACTOR = 2.0
#: A factor that counts as no difference after more iterations.
_TIE_FACTOR = 1.05
_EXTRA_ITERATIONS = 2
#: Iterations during which something else ran as well, before those count too.
_MAX_SHARED_ITERATIONS = 2


class Turn(NamedTuple):
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
    """Whose turn an iteration is, and which side is the faster.

    The home side begins, until the other side is ready. From then on it takes at most thirteen
    iterations, and a few more where something else runs at the same time. `is_ready`: whether the
    away side can begin at once; `is_complete`: whether all its workers are there.
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
        medians = {side: median(rates[side]) for side in _SIDES}
        winner: FleetSide = "away" if medians["away"] > _TIE_FACTOR * medians["home"] else "home"
        return ContestResult(winner, medians, {side: len(rates[side]) for side in _SIDES})

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
            if len(self._rates[side]) < target:
                yield Turn(side, is_timed=True)


class AutoFleet(ContextManagerMixin):
    """`local` ("home") is there already and begins; `remote` ("away") has to be worth it."""

    def __init__(
        self,
        local: Fleet,
        remote: Fleet,
        *,
        observer: Observer = ignore_event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleets: dict[FleetSide, Fleet] = {"home": local, "away": remote}
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()
        self._contest = Contest(
            lambda: remote.ready, lambda: len(remote.probe().workers) >= remote.capacity
        )
        #: Where evaluations run, and everything after the choice.
        self._side: FleetSide = "home"
        self._decided = self._has_reported = False
        self._submitted = 0
        self._open_counts: dict[FleetSide, int] = {"home": 0, "away": 0}
        self._release_thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self._fleets[self._side].name if self._decided else "auto"

    @property
    def capacity(self) -> int:
        return self._fleets[self._side].capacity

    @property
    def ready(self) -> bool:
        return self._fleets[self._side].ready

    @property
    def candidates(self) -> tuple[tuple[str, int], ...]:
        """Names and capacities of the fleets that may still be chosen; none after the choice."""
        if self._decided:
            return ()
        return tuple((fleet.name, fleet.capacity) for fleet in self._fleets.values())

    def put(self, policy: PolicyArrays) -> str:
        for fleet in self._list_open_fleets():
            fleet.put(policy)
        return make_policy_id(policy)

    def release(self, policy_id: str) -> None:
        for fleet in self._list_open_fleets():
            fleet.release(policy_id)

    def _list_open_fleets(self) -> list[Fleet]:
        with self._lock:
            return [self._fleets[self._side]] if self._decided else [*self._fleets.values()]

    def submit(self, tasks: Sequence[RolloutTask]) -> Submission:
        lap = self._start_lap(is_training=bool(tasks) and tasks[0].purpose == "train")
        try:
            lap.submission = self._fleets[lap.side].submit(tasks)
        except BaseException as error:
            lap.finish(error=error)
            raise
        return lap

    def probe(self) -> FleetReport:
        return self._fleets[self._side].probe()

    def read_traffic(self) -> Traffic:
        parts = [fleet.read_traffic() for fleet in self._fleets.values()]
        return Traffic(sum(p.bytes_out for p in parts), sum(p.bytes_in for p in parts))

    def close(self) -> None:
        if self._submitted and not self._has_reported:
            self._note("auto: the run was over before both sides had been timed")
        if self._release_thread is not None:
            self._release_thread.join()
        try:
            self._fleets["home"].close()
        finally:
            self._fleets["away"].close()

    def _start_lap(self, *, is_training: bool) -> _Lap:
        with self._lock:
            competes = is_training and not self._decided
            turn = self._contest.take_turn() if competes else None
            decides = competes and turn is None
            result = self._contest.make_result() if decides else None
            if decides:
                self._decided = True
                self._side = result.winner if result is not None else "home"
                self._release_loser()
            elif turn is not None:
                self._side = turn.side
            self._open_counts[self._side] += 1
            self._submitted += 1
            is_timed = turn is not None and turn.is_timed
            lap = _Lap(self, self._side, self._submitted, self._clock(), is_timed)
        if decides:
            self._note(self._format_result(result))
        return lap

    def finish_lap(self, lap: _Lap, steps: int, error: BaseException | None) -> None:
        """With the steps of all fragments, or the error that ended the submission."""
        seconds = self._clock() - lap.started_at
        if steps and lap.is_timed and seconds > 0.0:
            exclusive = self._submitted == lap.number
            self._contest.add_rate(lap.side, steps / seconds, exclusive=exclusive)
        if isinstance(error, FleetError) and lap.side == "away" and not self._decided:
            self._note(
                f"auto: {self._fleets['away'].name} failed while it was being timed; "
                f"{self._fleets['home'].name} can go on without it, with the same bits"
            )
        with self._lock:
            self._open_counts[lap.side] -= 1
            self._release_loser()

    def _release_loser(self) -> None:
        """In a thread, because a cluster takes its time to let go; with the lock held."""
        loser: FleetSide = "home" if self._side == "away" else "away"
        if self._decided and self._release_thread is None and not self._open_counts[loser]:
            self._release_thread = threading.Thread(
                target=self._close_loser, args=(loser,), name="rlflame-release", daemon=True
            )
            self._release_thread.start()

    def _close_loser(self, loser: FleetSide) -> None:
        if loser == "away":  # displays show the number of its workers
            self._observer(FleetEvent.of_workers(0))
        self._fleets[loser].close()

    def _format_result(self, result: ContestResult | None) -> str:
        local, remote = self._fleets["home"], self._fleets["away"]
        if result is None:
            return f"auto: no iteration could be timed on both sides; {local.name} goes on alone"
        winner = self._fleets[result.winner].name
        reason = (
            f"no difference to speak of, and {winner} needs nobody else"
            if result.is_tie
            else f"{winner} is {result.factor:.1f} times as fast"
        )
        rates, counts = result.steps_per_s, result.iterations
        return (
            f"auto: timed in turn, {local.name} with {local.capacity} comes to "
            f"{rates['home']:,.0f} steps/s and {remote.name} with {remote.capacity} to "
            f"{rates['away']:,.0f} (medians of {counts['home']} and {counts['away']} "
            f"iterations, starts apart): {reason}, and goes on alone"
        )

    def _note(self, text: str) -> None:
        self._has_reported = True
        self._observer(FleetEvent("note", "", 0, text))


@dataclass(eq=False)
class _Lap:
    """A submission that reports once when it is over, and whether all of it came."""

    fleet: AutoFleet
    side: FleetSide
    number: int
    started_at: float
    #: Whether its time counts.
    is_timed: bool
    submission: Submission = field(init=False)
    has_finished: bool = False

    def __iter__(self) -> Iterator[Fragment]:
        steps = 0
        try:
            for fragment in self.submission:
                steps += int(fragment.lengths.sum())
                yield fragment
        except FleetError as error:
            self.finish(error=error)
            raise
        self.finish(steps=steps)

    def cancel(self) -> None:
        self.submission.cancel()
        self.finish()

    def finish(self, *, steps: int = 0, error: BaseException | None = None) -> None:
        if not self.has_finished:
            self.has_finished = True
            self.fleet.finish_lap(self, steps, error)
