"""How fast transitions come into a replay from a fleet, and out of it again in samples.

Only what is new crosses the wire: the replay is where learning is. Nothing is learned, so that no
learner hides what moving transitions costs. Must not know: how anything is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlflame.bench.base import Case
from rlflame.bench.rollouts import RolloutRounds
from rlflame.bench.timed_run import Clock, Stopwatch
from rlflame.fleet.base import Fleet, TrafficCounter
from rlflame.learning import factory
from rlflame.learning.base import compute_digest
from rlflame.training.trainer import StopInterrupt, StopRequest

#: Batches drawn from the full replay, for what sampling alone takes.
_DRAWS = 500


@dataclass(frozen=True, slots=True)
class FillIteration:
    """One iteration, and what the replay had taken by then; `bytes_in` are the fleet's answers."""

    collect_s: float
    add_s: float
    sample_s: float
    bytes_in: int
    total_added: int


@dataclass(frozen=True, slots=True)
class ReplayFill:
    """One replay, filled; a batch is drawn after each iteration, as learning would."""

    iterations: tuple[FillIteration, ...]
    #: Transitions a second, of batches drawn one after the other at the end.
    drawn_per_s: float
    #: Names all that is in the replay by its content.
    content: str
    #: Tasks that went to a second worker meanwhile, which takes longer.
    retried: int = 0

    @property
    def transitions(self) -> int:
        return self.iterations[-1].total_added

    @property
    def collect_s(self) -> float:
        return sum(iteration.collect_s for iteration in self.iterations)

    @property
    def add_s(self) -> float:
        return sum(iteration.add_s for iteration in self.iterations)

    @property
    def sample_s(self) -> float:
        return sum(iteration.sample_s for iteration in self.iterations)

    @property
    def bytes_in(self) -> int:
        return sum(iteration.bytes_in for iteration in self.iterations)

    @property
    def seconds(self) -> float:
        return self.collect_s + self.add_s + self.sample_s

    @property
    def per_s(self) -> float:
        return self.transitions / self.seconds

    @property
    def added_per_s(self) -> float:
        return self.transitions / self.add_s


@dataclass(slots=True)
class FillSeries:
    """A fleet with a number of workers."""

    fleet: str
    workers: int
    fills: list[ReplayFill] = field(default_factory=list)


def fill(
    case: Case, fleet: Fleet, stop: StopRequest, clock: Clock = time.perf_counter
) -> ReplayFill | None:
    """All iterations of the case; None where somebody asked to stop."""
    # As wide as a learner's experience; this one is of a case that draws from it.
    replay: Any = factory.make_buffer(case.recipe.learning, case.env)
    traffic, passes = TrafficCounter(fleet), []
    with RolloutRounds(case, fleet, stop, "uniform") as rounds:
        for iteration in range(case.iterations):
            watch = Stopwatch(clock)
            try:
                with watch.time_phase("collect"):
                    fragments = rounds.collect()
            except StopInterrupt:
                return None
            with watch.time_phase("add"):
                replay.add(fragments, rounds.policy)
            with watch.time_phase("sample"):
                replay.draw(iteration)
            collect_s, add_s, sample_s = watch.spent_s.values()
            came = traffic.take()["bytes_in"]
            passes.append(FillIteration(collect_s, add_s, sample_s, came, replay.total_added))
    watch, sample_count = Stopwatch(clock), 0
    with watch.time_phase("draw"):
        for number in range(_DRAWS):
            sample_count += len(replay.draw(number).rewards)
    return ReplayFill(
        tuple(passes),
        sample_count / watch.spent_s["draw"],
        compute_digest(replay.get_state()),
    )


def fill_in_turn(
    case: Case,
    fleets: Mapping[str, Fleet],
    workers: int,
    repeat: int,
    stop: StopRequest,
    into: list[FillSeries],
    show_status: Callable[[str], None],
    take_retried: Callable[[], int] = lambda: 0,
) -> bool:
    """Repetition by repetition, each fleet in turn; False where somebody asked to stop."""
    for kind, fleet in fleets.items():
        show_status(f"{kind} with {workers}: starting")
        try:
            with RolloutRounds(case, fleet, stop, "uniform") as rounds:
                rounds.collect()
        except StopInterrupt:
            return False
        into.append(FillSeries(kind, 1 if kind == "inline" else workers))
    series = into[-len(fleets) :]
    for number in range(repeat):
        for filling in series:
            show_status(f"{filling.fleet} with {filling.workers}: {number + 1} of {repeat}")
            take_retried()
            replay_fill = fill(case, fleets[filling.fleet], stop)
            if replay_fill is None:
                return False
            filling.fills.append(replace(replay_fill, retried=take_retried()))
    return True
