"""Measures how fast a fleet fills a replay buffer, and how fast sampling is.

Nothing is learned, because learning would hide the cost of moving transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflame.analysis.report.document import Block, make_table
from rlflame.bench.case import Case, Clock, Stopwatch
from rlflame.bench.result import BenchResult, Side, format_bits, has_equal_digests
from rlflame.bench.rollouts import RolloutRounds
from rlflame.bench.runner import Benchmark, BenchSession
from rlflame.fleet.base import Fleet, TrafficCounter
from rlflame.learning import factory
from rlflame.learning.base import compute_digest
from rlflame.statistics import compute_median_interval
from rlflame.terminal_text import format_count
from rlflame.training.trainer import StopRequest

#: The number of batches that are drawn from the full replay buffer to time sampling alone.
_DRAWS = 500
_PHASES = ("collect_s", "add_s", "sample_s")
_MEDIANS = ("collect_share", "added_per_s", "drawn_per_s", "bytes_per_transition")
_RATE = "transitions_per_s"
_COLUMNS = (
    *("fleet", "workers", ("repetitions", "times", "")),
    ("transitions/s", _RATE, ",.0f"),
    ("collecting", "collect_share", ".1%"),
    ("adding alone, /s", "added_per_s", ",.0f"),
    ("sampling alone, /s", "drawn_per_s", ",.0f"),
    ("bytes per transition", "bytes_per_transition", ",.1f"),
)


def fill_replay(case: Case, fleet: Fleet, stop: StopRequest, clock: Clock) -> dict[str, Any]:
    """Fill a replay buffer with a case's rollouts; sample after each iteration."""
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


class ReplayBenchmark(Benchmark):
    """Measures how fast the rollouts of a case fill a replay buffer."""

    name = "replay"

    def warm_up(self, session: BenchSession, case: Case, fleet: Fleet) -> None:
        with RolloutRounds(case, fleet, session.stop, "uniform") as rounds:
            rounds.collect()

    def run_once(self, session: BenchSession, case: Case, fleet: Fleet) -> dict[str, Any]:
        return fill_replay(case, fleet, session.stop, session.clock)

    def make_result(self, sides: Sequence[Side]) -> BenchResult:
        case = self.case
        same_bits = has_equal_digests([d for side in sides for d in side.list_values("content")])
        fillings = [
            {
                **side.labels,
                "times": len(side.repetitions),
                **{key: side.compute_median(key) for key in _MEDIANS},
                _RATE: compute_median_interval(side.list_values(_RATE)),
                "fills": side.repetitions,
            }
            for side in sides
        ]
        facts = {
            "environment": case.env.id,
            "case": case.name,
            "iterations": case.iterations,
            "same_bits": same_bits,
            "fillings": fillings,
        }
        blocks: list[Block] = [
            f"{case.env.id}: {sides[0].repetitions[0]['transitions']:,} transitions from "
            f"random actions in {format_count(case.iterations, 'iteration')}, added to the replay "
            "buffer, with a batch sampled after each iteration. Start-up is not included.",
            make_table(fillings, _COLUMNS, 2),
            *format_bits([same_bits], "The contents of the replays"),
        ]
        work = case.work
        return BenchResult(
            self.name,
            facts,
            blocks,
            [side.make_measurement(_RATE, "transitions/s", work, "higher") for side in sides],
        )
