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
from rlflame.analysis.plots.chart import Chart, Panels, Series
from rlflame.analysis.report.document import Document, Section, Table
from rlflame.analysis.smoothing import moving_average
from rlflame.bench.base import Surroundings
from rlflame.bench.published_dppo import SOURCE
from rlflame.bench.race import THEIRS, Race, Runner
from rlflame.bench.scaling_model import agreed
from rlflame.bench.scaling_result import NOTHING, disturbed, surroundings
from rlflame.config.recipe import LearningSettings

HEAD = ("learners", "recipe", "seconds", "steps", "case", "final_return", "retried")
#: What a return is the mean of, at the end and along a line.
EPISODES = 20


def final_return(race: Race) -> float | None:
    newest = [earned for _, _, earned in race.episodes[-EPISODES:]]
    return sum(newest) / len(newest) if newest else None


@dataclass(frozen=True)
class Raced:
    """All that was seen; the first runner is the one that others are measured by."""

    name: str
    runners: Sequence[Runner]
    surroundings: Surroundings
    complete: bool

    @property
    def same_bits(self) -> bool | None:
        return agreed(race.weights for one in self._of("exact") for race in one.races)

    def speedup(self, runner: Runner) -> float:
        """Beside the first, in seconds a step: runs may differ in length."""
        return _cost(self.runners[0]) / _cost(runner)

    def facts(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "rlflame": __version__,
            "complete": self.complete,
            **self.surroundings.as_dict(),
            "same_bits": self.same_bits,
            "runners": [
                {
                    "recipe": one.kind,
                    "learners": one.learners,
                    "version": one.version,
                    "speedup": self.speedup(one),
                    "final_returns": [final_return(race) for race in one.races],
                    "races": [asdict(race) for race in one.races],
                }
                for one in self.runners
            ],
            "measurements": [
                {
                    "name": self._named(one),
                    "unit": "s",
                    "better": "lower",
                    "values": [race.seconds for race in one.races],
                    "retried": [race.retried for race in one.races],
                    "work": one.work,
                }
                for one in self.runners
            ],
        }

    def _named(self, runner: Runner) -> str:
        return f"{self.name}, {runner.kind} with {runner.learners}"

    def table(self) -> list[tuple[object, ...]]:
        """Theirs is a case of its own, so that ours is measured by one learner of ours."""
        return [
            HEAD,
            *(
                (
                    one.learners,
                    one.kind,
                    race.seconds,
                    race.steps,
                    THEIRS if one.variant is None else "rlflame",
                    "" if (earned := final_return(race)) is None else earned,
                    race.retried,
                )
                for one in self.runners
                for race in one.races
            ),
        ]

    def document(self) -> Document:
        head: tuple[str, ...] = ("recipe", "learners", "batch", "learning rate", "seconds")
        head += ("total steps", "speed-up", "ideal", "exchanging", "final return")
        first = self.runners[0]
        said: tuple[str | Table, ...] = (
            f"After {SOURCE}: as many workers as learners. Speed-up is of the time for as many "
            f"steps, beside {first.learners} of {first.kind}; the final return is the mean of the "
            f"newest training episodes, {EPISODES} at most. Medians of {len(first.races)}.",
            Table(head, tuple(self._row(one) for one in self.runners)),
            *self.compared(),
            *disturbed(
                {self._named(one): [race.retried for race in one.races] for one in self.runners}
            ),
            *(f"{THEIRS} {one.version}, one process with one thread." for one in self._of(THEIRS)),
        )
        found = tuple(surroundings(self.surroundings, self.complete))
        return Document(
            f"Benchmark: {self.name}", (Section("Races", said), Section("Measured on", found))
        )

    def curves(self) -> Panels | None:
        """Return by all steps, by those of one learner, and by time; None of no episodes."""
        if not any(one.races[0].episodes for one in self.runners):
            return None
        charts = []
        for label in ("Steps, all learners together", "Steps per learner", "Seconds"):
            lines = []
            for one in self.runners:
                ends = np.array(one.races[0].episodes, np.float64).reshape(-1, 3)
                window = max(1, min(EPISODES, len(ends)))
                x = ends[window - 1 :, 1 if label == "Seconds" else 0]
                if label == "Steps per learner":
                    x = x / one.learners
                y = moving_average(ends[:, 2], window)
                if len(y):
                    lines.append(Series(f"{one.kind}, {one.learners}", x, y))
            charts.append(Chart("", label, "Return", tuple(lines)))
        return Panels(tuple(charts), f"Lines: means of {EPISODES} episodes, or of all.")

    def compared(self) -> list[str]:
        """Of one number of learners there is nothing to say."""
        counts = [str(one.learners) for one in self._of("exact")]
        if len(counts) < 2:
            return []
        if self.same_bits is False:
            return ["The exact recipe did not learn the same weights."]
        return [f"The exact recipe learned the same weights by {', '.join(counts)} learners, to "
                "the last bit."]  # fmt: skip

    def _of(self, kind: str) -> list[Runner]:
        return [one for one in self.runners if one.kind == kind]

    def _row(self, one: Runner) -> tuple[str, ...]:
        exchanging = NOTHING
        variant = one.variant or self.runners[0].variant  # stable-baselines3 has what the first has
        assert variant is not None
        batch, rate = _batch_and_rate(variant.case.recipe.learning)
        if one.variant is not None:
            share = median((race.exchange_s or 0.0) / race.seconds for race in one.races)
            exchanging = f"{share:.1%}"
        earned = [found for race in one.races if (found := final_return(race)) is not None]
        return (
            one.kind,
            str(one.learners),
            batch,
            rate,
            f"{median(race.seconds for race in one.races):,.2f}",
            f"{one.races[0].steps:,}",
            f"{self.speedup(one):.2f}x",
            f"{one.learners / self.runners[0].learners:.3g}x",
            exchanging,
            f"{median(earned):,.1f}" if earned else NOTHING,
        )


def _cost(runner: Runner) -> float:
    return median(race.seconds / race.steps for race in runner.races)


def _batch_and_rate(learning: LearningSettings) -> tuple[str, str]:
    if learning.ppo is not None:
        return f"{learning.ppo.minibatch_size:,}", f"{learning.ppo.learning_rate:g}"
    assert learning.sac is not None
    return f"{learning.sac.batch_size:,}", f"{learning.sac.learning_rate:g}"
