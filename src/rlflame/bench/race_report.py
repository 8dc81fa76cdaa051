"""Recipes that were raced against each other, as data, in words and as lines of a picture.

Must not know: how it was measured, how anything is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from rlflame import __version__
from rlflame.analysis.curves import compute_moving_average
from rlflame.analysis.plots.chart import Chart, Panels, Series
from rlflame.analysis.report.document import Document, Section, Table
from rlflame.bench.base import MachineConditions
from rlflame.bench.published_dppo import SOURCE
from rlflame.bench.race import SB3_NAME, RaceRun, Runner
from rlflame.bench.scaling_model import has_equal_digests
from rlflame.bench.scaling_report import NOTHING, format_conditions, format_retried
from rlflame.config.recipe import LearningSettings

HEAD = ("learners", "recipe", "seconds", "steps", "case", "final_return", "retried")
#: What a return is the mean of, at the end and along a line.
EPISODES = 20


def compute_final_return(race: RaceRun) -> float | None:
    newest = [earned for _, _, earned in race.episodes[-EPISODES:]]
    return sum(newest) / len(newest) if newest else None


@dataclass(frozen=True)
class RaceResult:
    """All that was seen; the first runner is the one that others are measured by."""

    name: str
    runners: Sequence[Runner]
    conditions: MachineConditions
    complete: bool

    @property
    def same_bits(self) -> bool | None:
        return has_equal_digests(
            race.weights for runner in self._find_runners("exact") for race in runner.races
        )

    def compute_speedup(self, runner: Runner) -> float:
        """Beside the first, in seconds a step: runs may differ in length."""
        return _compute_seconds_per_step(self.runners[0]) / _compute_seconds_per_step(runner)

    def to_facts(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "rlflame": __version__,
            "complete": self.complete,
            **self.conditions.as_dict(),
            "same_bits": self.same_bits,
            "runners": [
                {
                    "recipe": runner.kind,
                    "learners": runner.learners,
                    "version": runner.version,
                    "speedup": self.compute_speedup(runner),
                    "final_returns": [compute_final_return(race) for race in runner.races],
                    "races": [asdict(race) for race in runner.races],
                }
                for runner in self.runners
            ],
            "measurements": [
                {
                    "name": self._format_name(runner),
                    "unit": "s",
                    "better": "lower",
                    "values": [race.seconds for race in runner.races],
                    "retried": [race.retried for race in runner.races],
                    "work": runner.work,
                }
                for runner in self.runners
            ],
        }

    def _format_name(self, runner: Runner) -> str:
        return f"{self.name}, {runner.kind} with {runner.learners}"

    def to_table(self) -> list[tuple[object, ...]]:
        """Theirs is a case of its own, so that ours is measured by one learner of ours."""
        return [
            HEAD,
            *(
                (
                    runner.learners,
                    runner.kind,
                    race.seconds,
                    race.steps,
                    SB3_NAME if runner.variant is None else "rlflame",
                    "" if (earned := compute_final_return(race)) is None else earned,
                    race.retried,
                )
                for runner in self.runners
                for race in runner.races
            ),
        ]

    def to_document(self) -> Document:
        head: tuple[str, ...] = ("recipe", "learners", "batch", "learning rate", "seconds")
        head += ("total steps", "speed-up", "ideal", "exchanging", "final return")
        first = self.runners[0]
        blocks: tuple[str | Table, ...] = (
            f"After {SOURCE}: as many workers as learners. Speed-up is of the time for as many "
            f"steps, beside {first.learners} of {first.kind}; the final return is the mean of the "
            f"newest training episodes, {EPISODES} at most. Medians of {len(first.races)}.",
            Table(head, tuple(self._make_row(runner) for runner in self.runners)),
            *self.format_weights_comparison(),
            *format_retried(
                {
                    self._format_name(runner): [race.retried for race in runner.races]
                    for runner in self.runners
                }
            ),
            *(
                f"{SB3_NAME} {runner.version}, one process with one thread."
                for runner in self._find_runners(SB3_NAME)
            ),
        )
        conditions = tuple(format_conditions(self.conditions, self.complete))
        return Document(
            f"Benchmark: {self.name}",
            (Section("Races", blocks), Section("Measured on", conditions)),
        )

    def to_panels(self) -> Panels | None:
        """Return by all steps, by those of one learner, and by time; None of no episodes."""
        if not any(runner.races[0].episodes for runner in self.runners):
            return None
        charts = []
        for label in ("Steps, all learners together", "Steps per learner", "Seconds"):
            lines = []
            for runner in self.runners:
                ends = np.array(runner.races[0].episodes, np.float64).reshape(-1, 3)
                window = max(1, min(EPISODES, len(ends)))
                x = ends[window - 1 :, 1 if label == "Seconds" else 0]
                if label == "Steps per learner":
                    x = x / runner.learners
                y = compute_moving_average(ends[:, 2], window)
                if len(y):
                    lines.append(Series(f"{runner.kind}, {runner.learners}", x, y))
            charts.append(Chart("", label, "Return", tuple(lines)))
        return Panels(tuple(charts), f"Lines: means of {EPISODES} episodes, or of all.")

    def format_weights_comparison(self) -> list[str]:
        """Of one number of learners there is nothing to say."""
        counts = [str(runner.learners) for runner in self._find_runners("exact")]
        if len(counts) < 2:
            return []
        if self.same_bits is False:
            return ["The exact recipe did not learn the same weights."]
        return [f"The exact recipe learned the same weights by {', '.join(counts)} learners, to "
                "the last bit."]  # fmt: skip

    def _find_runners(self, kind: str) -> list[Runner]:
        return [runner for runner in self.runners if runner.kind == kind]

    def _make_row(self, runner: Runner) -> tuple[str, ...]:
        exchanging = NOTHING
        variant = (
            runner.variant or self.runners[0].variant
        )  # stable-baselines3 has what the first has
        assert variant is not None
        batch, rate = _format_batch_and_rate(variant.case.recipe.learning)
        if runner.variant is not None:
            share = median((race.exchange_s or 0.0) / race.seconds for race in runner.races)
            exchanging = f"{share:.1%}"
        earned = [
            value for race in runner.races if (value := compute_final_return(race)) is not None
        ]
        return (
            runner.kind,
            str(runner.learners),
            batch,
            rate,
            f"{median(race.seconds for race in runner.races):,.2f}",
            f"{runner.races[0].steps:,}",
            f"{self.compute_speedup(runner):.2f}x",
            f"{runner.learners / self.runners[0].learners:.3g}x",
            exchanging,
            f"{median(earned):,.1f}" if earned else NOTHING,
        )


def _compute_seconds_per_step(runner: Runner) -> float:
    return median(race.seconds / race.steps for race in runner.races)


def _format_batch_and_rate(learning: LearningSettings) -> tuple[str, str]:
    if learning.ppo is not None:
        return f"{learning.ppo.minibatch_size:,}", f"{learning.ppo.learning_rate:g}"
    assert learning.sac is not None
    return f"{learning.sac.batch_size:,}", f"{learning.sac.learning_rate:g}"
