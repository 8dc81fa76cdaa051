"""Times training and gradient exchange with different numbers of learners."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from statistics import median
from typing import Any

from rlflame.analysis.report.document import Block, make_table
from rlflame.bench.case import Case, Stopwatch, run_case
from rlflame.bench.result import BenchResult, Side, compute_speedup, format_bits, has_equal_digests
from rlflame.bench.runner import Benchmark, BenchSession
from rlflame.config.recipe import LearningSettings, count_units, count_useful_learners
from rlflame.errors import ConfigError, LearnerFailure
from rlflame.experiment import components
from rlflame.experiment.learners.learner_group import LearnerGroup
from rlflame.fleet.base import Fleet
from rlflame.learning.factory import make_algorithm
from rlflame.learning.parallel.process_group import ProcessGroup
from rlflame.rollout.task import Float32
from rlflame.statistics import compute_median_interval
from rlflame.terminal_text import format_count

#: The hint that is shown if a learner is lost.
RETRY_HINT = "run the same command again"
_JOIN_TIMEOUT_S = 180.0
_CSV_HEAD = ("case", "learners", "backend", "seconds", "steps", "updates", "exchange_s")
#: The timed parts of a run, by their names in the table.
_PARTS = {"learning": "learn_s", "whole run": "seconds"}
_COLUMNS = (
    *("learners", ("repetitions", "times", "")),
    ("learning, s", "learn_s", ",.3f"),
    ("speed-up", "speedup_learning", ",.2fx"),
    ("ideal", "ideal", ".3gx"),
    ("whole run, s", "seconds", ",.3f"),
    ("speed-up", "speedup_whole", ",.2fx"),
    ("ms per update", "update_ms", ".2f"),
    ("computing", "compute_ms", ".2f"),
    ("exchange and wait", "exchange_ms", ".2f"),
    ("share", "exchange_share", ".1%"),
)


class TimedProcessGroup:
    """A process group whose exchanges are timed as a phase of a stopwatch."""

    #: Exchanges of compiled code through shared memory could not be timed.
    share_memory = None

    def __init__(self, group: ProcessGroup, watch: Stopwatch) -> None:
        self._group, self._watch = group, watch
        self.rank, self.size = group.rank, group.size

    def gather(self, values: Float32) -> Float32:
        with self._watch.time_phase("exchange"):
            return self._group.gather(values)

    def use_device(self, device: str) -> None:
        self._group.use_device(device)

    def broadcast(self, value: Any) -> Any:
        with self._watch.time_phase("exchange"):
            return self._group.broadcast(value)


class LearnersBenchmark(Benchmark):
    """Times the same training with each number of learners listed in `workers`."""

    name = "learners"

    def measure(self, session: BenchSession) -> Generator[None, None, None]:
        for count in self.workers:
            check_learners(self.case.recipe.learning, count)
        self.sides += [
            Side(f"{self.case.name}, {format_count(count, 'learner')}", {"learners": count})
            for count in self.workers
        ]
        with session.open_fleet(self.fleets[0], 1) as fleet:
            for side in session.take_turns(self.sides, self.repeat):
                side.repetitions.append(self._run_once(session, side.labels["learners"], fleet))
        yield

    def _run_once(self, session: BenchSession, learners: int, fleet: Fleet) -> dict[str, Any]:
        """Train once; return the times, excluding the first iteration as a warm-up."""
        watch = Stopwatch(session.clock)
        weights = run_with_learners(self.case, fleet, session, learners, watch)["weights"]
        first, last = watch.marks[0], watch.marks[-1]
        counts = {name: last.get(name, 0) - first.get(name, 0) for name in (*last, "exchange")}
        return {
            "seconds": counts["clock"],
            "learn_s": counts["learn"],
            # The exchange of batches and gradients, including the wait for other learners.
            "exchange_s": counts["exchange"],
            "steps": int(counts["steps"]),
            "updates": int(counts["updates"]),
            "weights": weights,
        }

    def make_result(self, sides: Sequence[Side]) -> BenchResult:
        learning = self.case.recipe.learning
        same_bits = has_equal_digests([w for side in sides for w in side.list_values("weights")])
        facts: dict[str, Any] = {
            "case": self.case.name,
            "gradient_shards": learning.gradient_shards,
            "samples": learning.samples_per_gradient,
            "same_bits": same_bits,
            "sides": [describe_side(side, sides[0]) for side in sides],
        }
        units = "x".join(map(str, learning.network.hidden))
        blocks: list[Block] = [
            f"{self.case.name}: {units} units, {learning.samples_per_gradient:,} samples per "
            f"update, {format_count(self.case.iterations - 1, 'iteration')} after a warm-up. "
            "All runs collect the same rollouts, whose time counts only in the whole run. Updates "
            "are timed on the first learner.",
            make_table(facts["sides"], _COLUMNS),
            *format_bits([same_bits], "The learned weights"),
        ]
        return BenchResult(
            self.name,
            facts,
            blocks,
            [side.make_measurement("learn_s", "s", self.case.work) for side in sides],
            [_CSV_HEAD, *_make_csv_rows(sides)],
        )


def check_learners(learning: LearningSettings, learners: int) -> None:
    """Raise ConfigError if the learners cannot share the units of work evenly."""
    units = count_units(learning)
    if learners != count_useful_learners(units, learners):
        raise ConfigError(
            f"{learners} learners cannot share {format_count(units, 'unit')} of work evenly.",
            f"--set learning.gradient_shards={learners}",
        )


def run_with_learners(
    case: Case, fleet: Fleet, session: BenchSession, learners: int, watch: Stopwatch
) -> dict[str, Any]:
    """Run a case with several learners; `watch` times their exchanges."""
    learning = case.recipe.learning
    spec = components.make_policy_spec(learning, case.env)
    group = LearnerGroup(
        make_algorithm(learning, spec),
        learning,
        spec,
        session.runtime,
        learners,
        session.show_note,
        wrap=lambda group: TimedProcessGroup(group, watch),
    )
    try:
        if learners > 1 and not group.wait_for_others(_JOIN_TIMEOUT_S):
            raise LearnerFailure("The other learners did not start in time.", RETRY_HINT)
        return run_case(case, fleet, session.stop, watch, group)
    finally:
        group.close()


def describe_side(side: Side, base: Side) -> dict[str, Any]:
    """Return the measurements for one number of learners, with the speed-up."""
    update_ms, exchange_ms = (
        median(1000.0 * run[part] / max(1, run["updates"]) for run in side.repetitions)
        for part in ("learn_s", "exchange_s")
    )
    return {
        **side.labels,
        "times": len(side.repetitions),
        "runs": side.repetitions,
        "learn_s": compute_median_interval(side.list_values("learn_s")),
        "speedup_learning": compute_speedup(
            base.list_values("learn_s"), side.list_values("learn_s")
        ),
        "seconds": compute_median_interval(side.list_values("seconds")),
        "speedup_whole": compute_speedup(base.list_values("seconds"), side.list_values("seconds")),
        "ideal": side.labels["learners"] / base.labels["learners"],
        "update_ms": update_ms,
        "compute_ms": update_ms - exchange_ms,
        "exchange_ms": exchange_ms,
        "exchange_share": exchange_ms / update_ms,
    }


def _make_csv_rows(sides: Sequence[Side]) -> list[tuple[object, ...]]:
    """Return a CSV row for each timed part of each run."""
    return [
        (name, side.labels["learners"], "measured",
         run[part], run["steps"], run["updates"], run["exchange_s"])
        for name, part in _PARTS.items()
        for side in sides
        for run in side.repetitions
    ]  # fmt: skip


def find_shard_count(counts: Sequence[int], fewest: int) -> int:
    """Return the smallest common multiple of `counts` that is at least `fewest`."""
    common = math.lcm(*counts)
    return common * -(-fewest // common)
