"""How fast transitions come from a fleet into a replay, and out of it again in samples.

Nothing is learned, so that no learner hides what moving transitions costs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlflame.analysis.report.document import Block, Section
from rlflame.bench.case import Case, Clock, Stopwatch
from rlflame.bench.result import BenchResult, Side, format_bits, has_equal_digests, make_table
from rlflame.bench.rollouts import RolloutRounds
from rlflame.bench.runner import BenchSession
from rlflame.fleet.base import Fleet, TrafficCounter
from rlflame.learning import factory
from rlflame.learning.base import compute_digest
from rlflame.statistics import compute_median_interval
from rlflame.terminal_text import format_count
from rlflame.training.trainer import StopRequest

#: Batches drawn from the full replay, for the time that sampling alone takes.
_DRAWS = 500
_PHASES = ("collect_s", "add_s", "sample_s")
_MEDIANS = ("collect_share", "added_per_s", "drawn_per_s", "bytes_per_transition")
_RATE = "transitions_per_s"
_RATES = (
    *("fleet", "workers", "times"),
    ("transitions/s", _RATE, ",.0f"),
    ("collecting", "collect_share", ".1%"),
    ("adding alone, /s", "added_per_s", ",.0f"),
    ("sampling alone, /s", "drawn_per_s", ",.0f"),
    ("bytes a transition", "bytes_per_transition", ",.1f"),
)


def fill_replay(case: Case, fleet: Fleet, stop: StopRequest, clock: Clock) -> dict[str, Any]:
    """Run the iterations of the case into an empty replay; a batch is drawn after each of them."""
    replay: Any = factory.make_buffer(case.recipe.learning, case.env)
    traffic, iterations = TrafficCounter(fleet), list[dict[str, float]]()
    watch = Stopwatch(clock)
    with RolloutRounds(case, fleet, stop, "uniform") as rounds:
        for number in range(case.iterations):
            watch.spent_s.clear()
            with watch.time_phase("collect_s"):
                fragments = rounds.collect()
            with watch.time_phase("add_s"):
                replay.add(fragments, rounds.policy)
            with watch.time_phase("sample_s"):
                replay.draw(number)
            counts = {"bytes_in": traffic.take()["bytes_in"], "total_added": replay.total_added}
            iterations.append({**watch.spent_s, **counts})
    with watch.time_phase("draw"):
        num_samples = sum(len(replay.draw(number).rewards) for number in range(_DRAWS))
    totals = {
        key: sum(iteration[key] for iteration in iterations) for key in (*_PHASES, "bytes_in")
    }
    seconds, transitions = sum(totals[phase] for phase in _PHASES), replay.total_added
    return {
        "iterations": iterations,
        "transitions": transitions,
        _RATE: transitions / seconds,
        "collect_share": totals["collect_s"] / seconds,
        "added_per_s": transitions / totals["add_s"],
        "drawn_per_s": num_samples / watch.spent_s["draw"],
        "bytes_per_transition": totals["bytes_in"] / transitions,
        "content": compute_digest(replay.get_state()),
    }


@dataclass
class ReplayBenchmark:
    """Replays filled by several fleets, in turn, with one number of workers after the other."""

    case: Case
    fleets: Sequence[str]
    workers: Sequence[int]
    repeat: int
    sides: list[Side] = field(default_factory=list)
    name: ClassVar[str] = "replay"

    def measure(self, session: BenchSession) -> Generator[None, None, None]:
        def warm_up(fleet: Fleet) -> None:
            with RolloutRounds(self.case, fleet, session.stop, "uniform") as rounds:
                rounds.collect()

        for count in self.workers:
            with session.open_fleets(self.fleets, count, min(self.workers), warm_up) as opened:
                fleets = {entry.kind: entry.fleet for entry in opened}
                group = [entry.make_side(self.case.name) for entry in opened]
                self.sides += group
                for side in session.take_turns(group, self.repeat):
                    fleet = fleets[side.labels["fleet"]]
                    fill = fill_replay(self.case, fleet, session.stop, session.clock)
                    side.repetitions.append({**fill, "retried": session.take_retried()})
            yield

    def make_result(self, sides: Sequence[Side]) -> BenchResult:
        same_bits = has_equal_digests([d for side in sides for d in side.list_values("content")])
        fillings = [
            {
                **side.describe(_MEDIANS),
                _RATE: compute_median_interval(side.list_values(_RATE)),
                "fills": side.repetitions,
            }
            for side in sides
        ]
        facts = {
            "environment": self.case.env.id,
            "case": self.case.name,
            "iterations": self.case.iterations,
            "same_bits": same_bits,
            "fillings": fillings,
        }
        blocks: tuple[Block, ...] = (
            self._describe_work(sides[0].repetitions[0]["transitions"]),
            make_table(fillings, _RATES, 2),
            *format_bits(
                [same_bits],
                "Every replay held the same in the end, to the last bit.",
                "The replays did not hold the same.",
                self.fleets,
            ),
            *map(_format_traffic, filter(_has_traffic, sides)),
        )
        work = self.case.work
        return BenchResult(
            self.name,
            f"Benchmark: a replay of {self.case.env.id}",
            facts,
            [Section("Rate", blocks)],
            [side.make_measurement(_RATE, "transitions/s", work, "higher") for side in sides],
        )

    def _describe_work(self, transitions: int) -> str:
        rollout, settings = self.case.recipe.learning.rollout, self.case.recipe.learning.replay
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


def _has_traffic(side: Side) -> bool:
    iterations = side.repetitions[-1]["iterations"]
    return len(iterations) > 1 and iterations[0]["bytes_in"] > 0


def _format_traffic(side: Side) -> str:
    """Whether the bytes on the wire grow with the size of the replay."""
    first, *_, last = (entry["bytes_in"] for entry in side.repetitions[-1]["iterations"])
    reason = "" if last > 1.2 * first else ": what is new crosses, and nothing else"
    return (
        f"From {side.labels['fleet']} came {first:,} bytes in the first iteration and {last:,} in "
        f"the last{reason}."
    )
