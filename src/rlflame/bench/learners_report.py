"""A benchmark of several learners as data and in words. Must not know: how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from rlflame import __version__
from rlflame.analysis.report.document import Block, Document, Section, Table
from rlflame.bench.base import Case, MachineConditions
from rlflame.bench.learners import LearnerSide, LearningRun
from rlflame.bench.scaling_model import has_equal_digests
from rlflame.bench.scaling_report import format_bits, format_conditions, format_interval
from rlflame.rollout.spec import Float64
from rlflame.statistics import Interval, compare_medians, compute_median_interval
from rlflame.terminal_text import format_count

HEAD = ("case", "learners", "backend", "seconds", "steps", "updates", "exchange_s")
RunMetric = Callable[[LearningRun], float]


@dataclass(frozen=True)
class LearnersResult:
    """All that was seen; the first side is the one that others are measured by."""

    case: Case
    sides: Sequence[LearnerSide]
    conditions: MachineConditions
    complete: bool

    @property
    def same_bits(self) -> bool | None:
        return has_equal_digests(run.weights for side in self.sides for run in side.runs)

    def compute_speedup(self, side: LearnerSide, part: RunMetric) -> Interval:
        """Beside the first, in seconds a step of the environment: runs may differ in length."""
        seconds, first = (
            _compute_seconds_per_step(side, part),
            _compute_seconds_per_step(self.sides[0], part),
        )
        change = compare_medians(first, seconds)
        return Interval(*(1.0 + value / 100.0 for value in (change.value, change.low, change.high)))

    def compute_ideal(self, side: LearnerSide) -> float:
        return side.learners / self.sides[0].learners

    def to_facts(self) -> dict[str, Any]:
        learning = self.case.recipe.learning
        return {
            "benchmark": "learners",
            "rlflame": __version__,
            "complete": self.complete,
            **self.conditions.as_dict(),
            "case": self.case.name,
            "algorithm": learning.algorithm,
            "provider": learning.provider,
            "gradient_shards": learning.gradient_shards,
            "samples": learning.samples_per_gradient,
            "hidden": list(learning.network.hidden),
            "same_bits": self.same_bits,
            "sides": [
                {
                    "learners": side.learners,
                    "runs": [asdict(run) for run in side.runs],
                    "speedup_learning": self.compute_speedup(side, _get_learn_s).as_dict(),
                    "speedup_whole": self.compute_speedup(side, _get_seconds).as_dict(),
                    "ideal": self.compute_ideal(side),
                }
                for side in self.sides
            ],
            "measurements": [
                {
                    "name": f"{self.case.name}, {format_count(side.learners, 'learner')}",
                    "unit": "s",
                    "better": "lower",
                    "values": [run.learn_s for run in side.runs],
                    "work": self.case.work,
                }
                for side in self.sides
            ],
        }

    def to_table(self) -> list[tuple[object, ...]]:
        """A row for each run, as often as there are cases, below the head."""
        return [
            HEAD,
            *(
                (name, side.learners, "measured", part(run), run.steps, run.updates, run.exchange_s)
                for name, part in (("learning", _get_learn_s), ("whole run", _get_seconds))
                for side in self.sides
                for run in side.runs
            ),
        ]

    def to_document(self) -> Document:
        conditions = format_conditions(self.conditions, self.complete)
        return Document(
            "Benchmark: learners",
            (
                Section("Speed-up", tuple(self._make_speedup_blocks())),
                Section("Where the time of an update goes", tuple(self._make_update_blocks())),
                Section("Measured on", tuple(conditions)),
            ),
        )

    def _make_speedup_blocks(self) -> list[Block]:
        head = ("learners", "times", "learning, s", "speed-up", "ideal", "whole run", "speed-up")
        body = tuple(
            (
                str(side.learners),
                str(len(side.runs)),
                format_interval(_compute_median(side, _get_learn_s), len(side.runs), 3),
                format_interval(self.compute_speedup(side, _get_learn_s), len(side.runs), 2, "x"),
                f"{self.compute_ideal(side):.3g}x",
                format_interval(_compute_median(side, _get_seconds), len(side.runs), 3),
                format_interval(self.compute_speedup(side, _get_seconds), len(side.runs), 2, "x"),
            )
            for side in self.sides
        )
        learning = self.case.recipe.learning
        units = "x".join(map(str, learning.network.hidden))
        return [
            f"{self.case.name}: {learning.algorithm.upper()} by {learning.provider}, {units} "
            f"units, {learning.samples_per_gradient:,} samples an update in "
            f"{format_count(learning.gradient_shards, 'shard')}, "
            f"{format_count(self.case.iterations - 1, 'iteration')} after one to warm up. "
            "Rollouts are "
            "the same on all sides and count in the whole run only; speed-up is of the time for as "
            "many steps.",
            Table(head, body),
            *format_bits(
                [self.same_bits],
                "All learned the same weights, to the last bit.",
                "They did not learn the same weights.",
            ),
        ]

    def _make_update_blocks(self) -> list[Block]:
        head = ("learners", "ms an update", "computing", "exchanging and waiting", "share")
        body = []
        for side in self.sides:
            total = median(1000.0 * run.learn_s / max(1, run.updates) for run in side.runs)
            exchange = median(1000.0 * run.exchange_s / max(1, run.updates) for run in side.runs)
            row = (
                f"{total:.2f}",
                f"{total - exchange:.2f}",
                f"{exchange:.2f}",
                f"{exchange / total:.1%}",
            )
            body.append((str(side.learners), *row))
        return [
            "On the first learner's clock. Less of it is exchange where a minibatch is larger or "
            "its networks wider.",
            Table(head, tuple(body)),
        ]


def _get_learn_s(run: LearningRun) -> float:
    return run.learn_s


def _get_seconds(run: LearningRun) -> float:
    return run.seconds


def _compute_seconds_per_step(side: LearnerSide, part: RunMetric) -> Float64:
    return np.array([part(run) / run.steps for run in side.runs], np.float64)


def _compute_median(side: LearnerSide, part: RunMetric) -> Interval:
    return compute_median_interval(np.array([part(run) for run in side.runs], np.float64))
