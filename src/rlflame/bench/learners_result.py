"""A benchmark of several learners as data and in words. Must not know: how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from rlflame import __version__
from rlflame.analysis.report.document import Block, Document, Section, Table
from rlflame.bench.base import Case, Surroundings
from rlflame.bench.learners import Learning, Side
from rlflame.bench.scaling_model import agreed
from rlflame.bench.scaling_result import bits, spread, surroundings
from rlflame.rollout.spec import Float64
from rlflame.statistics import Interval, compare_medians, median_interval
from rlflame.text import format_count

HEAD = ("case", "learners", "backend", "seconds", "steps", "updates", "exchange_s")
Part = Callable[[Learning], float]


@dataclass(frozen=True)
class Learned:
    """All that was seen; the first side is the one that others are measured by."""

    case: Case
    sides: Sequence[Side]
    surroundings: Surroundings
    complete: bool

    @property
    def same_bits(self) -> bool | None:
        return agreed(run.weights for side in self.sides for run in side.runs)

    def speedup(self, side: Side, part: Part) -> Interval:
        """Beside the first, in seconds a step of the environment: runs may differ in length."""
        ours, first = _each(side, part), _each(self.sides[0], part)
        change = compare_medians(first, ours)
        return Interval(*(1.0 + value / 100.0 for value in (change.value, change.low, change.high)))

    def ideal(self, side: Side) -> float:
        return side.learners / self.sides[0].learners

    def facts(self) -> dict[str, Any]:
        learning = self.case.recipe.learning
        return {
            "benchmark": "learners",
            "rlflame": __version__,
            "complete": self.complete,
            **self.surroundings.as_dict(),
            "case": self.case.name,
            "algorithm": learning.algorithm,
            "provider": learning.provider,
            "gradient_shards": learning.gradient_shards,
            "samples": learning.samples,
            "hidden": list(learning.network.hidden),
            "same_bits": self.same_bits,
            "sides": [
                {
                    "learners": side.learners,
                    "runs": [asdict(run) for run in side.runs],
                    "speedup_learning": self.speedup(side, _learning).as_dict(),
                    "speedup_whole": self.speedup(side, _whole).as_dict(),
                    "ideal": self.ideal(side),
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

    def table(self) -> list[tuple[object, ...]]:
        """A row for each run, as often as there are cases, below the head."""
        return [
            HEAD,
            *(
                (name, side.learners, "measured", part(run), run.steps, run.updates, run.exchange_s)
                for name, part in (("learning", _learning), ("whole run", _whole))
                for side in self.sides
                for run in side.runs
            ),
        ]

    def document(self) -> Document:
        found = surroundings(self.surroundings, self.complete)
        return Document(
            "Benchmark: learners",
            (
                Section("Speed-up", tuple(self._speedups())),
                Section("Where the time of an update goes", tuple(self._updates())),
                Section("Measured on", tuple(found)),
            ),
        )

    def _speedups(self) -> list[Block]:
        head = ("learners", "times", "learning, s", "speed-up", "ideal", "whole run", "speed-up")
        body = tuple(
            (
                str(side.learners),
                str(len(side.runs)),
                spread(_median(side, _learning), len(side.runs), 3),
                spread(self.speedup(side, _learning), len(side.runs), 2, "x"),
                f"{self.ideal(side):.3g}x",
                spread(_median(side, _whole), len(side.runs), 3),
                spread(self.speedup(side, _whole), len(side.runs), 2, "x"),
            )
            for side in self.sides
        )
        learning = self.case.recipe.learning
        units = "x".join(map(str, learning.network.hidden))
        return [
            f"{self.case.name}: {learning.algorithm.upper()} by {learning.provider}, {units} "
            f"units, {learning.samples:,} samples an update in "
            f"{format_count(learning.gradient_shards, 'shard')}, "
            f"{format_count(self.case.iterations - 1, 'iteration')} after one to warm up. "
            "Rollouts are "
            "the same on all sides and count in the whole run only; speed-up is of the time for as "
            "many steps.",
            Table(head, body),
            *bits(
                [self.same_bits],
                "All learned the same weights, to the last bit.",
                "They did not learn the same weights.",
            ),
        ]

    def _updates(self) -> list[Block]:
        head = ("learners", "ms an update", "computing", "exchanging and waiting", "share")
        body = []
        for side in self.sides:
            whole = median(1000.0 * run.learn_s / max(1, run.updates) for run in side.runs)
            apart = median(1000.0 * run.exchange_s / max(1, run.updates) for run in side.runs)
            row = (f"{whole:.2f}", f"{whole - apart:.2f}", f"{apart:.2f}", f"{apart / whole:.1%}")
            body.append((str(side.learners), *row))
        return [
            "On the first learner's clock. Less of it is exchange where a minibatch is larger or "
            "its networks wider.",
            Table(head, tuple(body)),
        ]


def _learning(run: Learning) -> float:
    return run.learn_s


def _whole(run: Learning) -> float:
    return run.seconds


def _each(side: Side, part: Part) -> Float64:
    return np.array([part(run) / run.steps for run in side.runs], np.float64)


def _median(side: Side, part: Part) -> Interval:
    return median_interval(np.array([part(run) for run in side.runs], np.float64))
