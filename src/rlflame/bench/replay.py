"""How fast transitions come from a fleet into a replay, and out of it again in samples.

Nothing is learned, so that no learner hides what moving transitions costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, ClassVar

from rlflame.analysis.report.bench_comparison import Measurement
from rlflame.analysis.report.document import Section
from rlflame.bench.case import Case, Clock, Stopwatch
from rlflame.bench.machine_load import MachineConditions
from rlflame.bench.result import (
    BenchResult,
    compute_median,
    format_bits,
    has_equal_digests,
    make_table,
)
from rlflame.bench.rollouts import RolloutRounds
from rlflame.bench.runner import BenchSession
from rlflame.fleet.base import Fleet, TrafficCounter
from rlflame.learning import factory
from rlflame.learning.base import compute_digest
from rlflame.terminal_text import format_count
from rlflame.training.trainer import StopRequest

#: Batches drawn from the full replay, for the time that sampling alone takes.
_DRAWS = 500
_RATES = (
    ("fleet", "fleet", ""),
    ("workers", "workers", ""),
    ("times", "times", ""),
    ("transitions/s", "transitions_per_s", ",.0f"),
    ("collecting", "collect_share", ".1%"),
    ("adding alone, /s", "added_per_s", ",.0f"),
    ("sampling alone, /s", "drawn_per_s", ",.0f"),
    ("bytes a transition", "bytes_per_transition", ",.1f"),
)


@dataclass(frozen=True, slots=True)
class ReplayFill:
    """One replay, filled; a batch is drawn after each iteration, as learning would."""

    #: Of each: `collect_s`, `add_s`, `sample_s`, the `bytes_in` of the fleet's answers, and the
    #: transitions that the replay has taken until then, `total_added`.
    iterations: tuple[dict[str, float], ...]
    #: Transitions a second, of batches drawn one after the other at the end.
    drawn_per_s: float
    #: Names everything in the replay by its content.
    content: str
    #: Tasks that went to a second worker meanwhile, which takes longer.
    retried: int = 0

    @property
    def transitions(self) -> int:
        return int(self.iterations[-1]["total_added"])

    @property
    def transitions_per_s(self) -> float:
        return self.transitions / self.sum_iterations("collect_s", "add_s", "sample_s")

    @property
    def added_per_s(self) -> float:
        return self.transitions / self.sum_iterations("add_s")

    @property
    def collect_share(self) -> float:
        return self.sum_iterations("collect_s") * self.transitions_per_s / self.transitions

    @property
    def bytes_per_transition(self) -> float:
        return self.sum_iterations("bytes_in") / self.transitions

    def sum_iterations(self, *names: str) -> float:
        return sum(iteration[name] for iteration in self.iterations for name in names)

    def as_dict(self) -> dict[str, Any]:
        names = ("transitions", "transitions_per_s", "added_per_s")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


@dataclass(slots=True)
class FillSeries:
    """The fills of a fleet with a number of workers."""

    name: str
    fleet: str
    workers: int
    fills: list[ReplayFill] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        names = ("collect_share", "added_per_s", "drawn_per_s", "bytes_per_transition")
        return {
            "fleet": self.fleet,
            "workers": self.workers,
            "times": len(self.fills),
            "transitions_per_s": compute_median([fill.transitions_per_s for fill in self.fills]),
            **{name: median(getattr(fill, name) for fill in self.fills) for name in names},
            "fills": [fill.as_dict() for fill in self.fills],
        }


def fill_replay(case: Case, fleet: Fleet, stop: StopRequest, clock: Clock) -> ReplayFill:
    """Run all iterations of the case into an empty replay."""
    replay: Any = factory.make_buffer(case.recipe.learning, case.env)
    traffic, iterations = TrafficCounter(fleet), list[dict[str, float]]()
    with RolloutRounds(case, fleet, stop, "uniform") as rounds:
        for number in range(case.iterations):
            watch = Stopwatch(clock)
            with watch.time_phase("collect_s"):
                fragments = rounds.collect()
            with watch.time_phase("add_s"):
                replay.add(fragments, rounds.policy)
            with watch.time_phase("sample_s"):
                replay.draw(number)
            counts = {"bytes_in": traffic.take()["bytes_in"], "total_added": replay.total_added}
            iterations.append({**watch.spent_s, **counts})
    watch, sample_count = Stopwatch(clock), 0
    with watch.time_phase("draw"):
        for number in range(_DRAWS):
            sample_count += len(replay.draw(number).rewards)
    drawn_per_s = sample_count / watch.spent_s["draw"]
    return ReplayFill(tuple(iterations), drawn_per_s, compute_digest(replay.get_state()))


@dataclass
class ReplayBenchmark:
    """Replays filled by several fleets, in turn, with one number of workers after the other."""

    case: Case
    fleets: Sequence[str]
    workers: Sequence[int]
    repeat: int
    series: list[FillSeries] = field(default_factory=list)
    name: ClassVar[str] = "replay"

    def measure(self, session: BenchSession) -> Iterator[None]:
        def warm_up(fleet: Fleet) -> None:
            with RolloutRounds(self.case, fleet, session.stop, "uniform") as rounds:
                rounds.collect()

        for count in self.workers:
            with session.open_fleets(self.fleets, count, min(self.workers), warm_up) as opened:
                fleets = {entry.kind: entry.fleet for entry in opened}
                group = [
                    FillSeries(f"{self.case.name}, {kind} with {workers}", kind, workers)
                    for kind, workers, *_ in opened
                ]
                self.series += group
                for series in session.take_turns(group, self.repeat):
                    fleet = fleets[series.fleet]
                    fill = fill_replay(self.case, fleet, session.stop, session.clock)
                    series.fills.append(replace(fill, retried=session.take_retried()))
            yield

    def make_result(self, conditions: MachineConditions, complete: bool) -> BenchResult | None:
        filled = [series for series in self.series if series.fills]
        if not filled:
            return None
        same_bits = has_equal_digests(fill.content for series in filled for fill in series.fills)
        facts: dict[str, Any] = {
            "environment": self.case.env.id,
            "case": self.case.name,
            "iterations": self.case.iterations,
            "same_bits": same_bits,
            "fillings": [series.as_dict() for series in filled],
        }
        blocks = (
            self._describe_work(filled[0].fills[0].transitions),
            make_table(facts["fillings"], _RATES, 2),
            *format_bits(
                [same_bits],
                "Every replay held the same in the end, to the last bit.",
                "The replays did not hold the same.",
                elsewhere=any(series.fleet == "flame" for series in filled),
            ),
            *(text for series in filled for text in _format_traffic(series)),
        )
        measurements = [
            Measurement(
                series.name,
                "transitions/s",
                True,
                tuple(fill.transitions_per_s for fill in series.fills),
                self.case.work,
                tuple(fill.retried for fill in series.fills),
            )
            for series in filled
        ]
        return BenchResult(
            self.name,
            f"Benchmark: a replay of {self.case.env.id}",
            facts,
            [Section("Rate", blocks)],
            measurements,
            conditions,
            complete,
        )

    def _describe_work(self, transitions: int) -> str:
        rollout, settings = self.case.recipe.learning.rollout, self.case.recipe.learning.sac
        assert settings is not None
        room = ""
        if settings.buffer_size < transitions:
            round_steps = rollout.columns * rollout.steps
            room = f" (room is for {settings.buffer_size:,}, and a round is {round_steps:,})"
        return (
            f"{transitions:,} transitions of random actions{room}: "
            f"{format_count(self.case.iterations, 'iteration')} of "
            f"{format_count(rollout.num_slots, 'fragment')} of "
            f"{format_count(rollout.steps, 'step')}, from the fleet into the replay, and a batch "
            f"of {settings.batch_size} out of it after each. Start-up is in no figure."
        )


def _format_traffic(series: FillSeries) -> list[str]:
    """Whether what crosses the wire grows with what is stored."""
    iterations = series.fills[-1].iterations
    first, last = iterations[0]["bytes_in"], iterations[-1]["bytes_in"]
    if not first or len(iterations) < 2:
        return []
    reason = "" if last > 1.2 * first else ": what is new crosses, and nothing else"
    return [
        f"From {series.fleet} came {first:,} bytes in the first iteration and {last:,} in the "
        f"last{reason}."
    ]
