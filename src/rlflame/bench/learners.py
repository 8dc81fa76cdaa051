"""The same training by one learner and by several, timed: what is computed, what is exchanged.

The rollouts are the same on every side and are timed apart. Must not know: words, files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rlflame.bench.base import Case
from rlflame.bench.timing import Clock, Stopwatch
from rlflame.config.runtime import RuntimeSettings
from rlflame.experiment import components
from rlflame.experiment.learners import launcher
from rlflame.experiment.run_settings import check_learners
from rlflame.fleet.base import Fleet, policy_id
from rlflame.learning.factory import blas_threads
from rlflame.learning.parallel.process_group import Group
from rlflame.rollout.spec import Float32, Fragment
from rlflame.text import format_count
from rlflame.training.trainer import Progress, Stop

#: What to do when a learner was lost.
AGAIN = "the same command measures anew"


@dataclass(frozen=True, slots=True)
class Learning:
    """One run, without its first iteration, in which everybody warms up."""

    seconds: float
    learn_s: float
    #: Of learning: giving and taking batches and gradients, waiting for the others included.
    exchange_s: float
    steps: int
    updates: int
    weights: str


@dataclass(slots=True)
class Side:
    """One number of learners."""

    learners: int
    runs: list[Learning] = field(default_factory=list)


class Timed:
    """A group whose exchanges are timed, on the first learner's clock."""

    def __init__(self, group: Group, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self.rank, self.size = group.rank, group.size
        self.spent_s = 0.0

    def gather(self, mine: Float32) -> Float32:
        began = self._clock()
        found = self._group.gather(mine)
        self.spent_s += self._clock() - began
        return found

    def meet_on(self, device: str) -> None:
        self._group.meet_on(device)

    def share(self, value: Any) -> Any:
        began = self._clock()
        found = self._group.share(value)
        self.spent_s += self._clock() - began
        return found


class _FromTheSecond(Stopwatch):
    """A stopwatch that says how things stood when the first iteration was over."""

    def __init__(self, clock: Clock, exchanged_s: Callable[[], float]) -> None:
        super().__init__(clock)
        self._exchanged_s = exchanged_s
        self.marks: list[tuple[float, float, float, int, float]] = []

    def iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        super().iteration(progress, metrics, fragments)
        learn_s = self.spent_s.get("learn", 0.0)
        updates = float(metrics.get("n_updates", 0.0))
        mark = (self._clock(), learn_s, self._exchanged_s(), progress.steps, updates)
        self.marks.append(mark)


@dataclass
class Together:
    """`sides` grows while it runs; the numbers of learners take turns."""

    case: Case
    counts: Sequence[int]
    repeat: int
    runtime: RuntimeSettings
    open: Callable[[], AbstractContextManager[Fleet]]
    stop: Stop
    tell: Callable[[str], None] = lambda text: None
    clock: Clock = time.perf_counter
    sides: list[Side] = field(default_factory=list)

    def run(self) -> bool:
        """False where somebody asked to stop before the end."""
        for learners in self.counts:
            check_learners(self.case.recipe.learning, learners)
        self.sides += [Side(learners) for learners in self.counts]
        with self.open() as fleet:
            for number in range(self.repeat):
                for side in self.sides:
                    self.tell(
                        f"{format_count(side.learners, 'learner')}: {number + 1} of {self.repeat}"
                    )
                    found = self._once(side.learners, fleet)
                    if found is None:
                        return False
                    side.runs.append(found)
        return True

    def _once(self, learners: int, fleet: Fleet) -> Learning | None:
        recipe = self.case.recipe
        runtime = self.runtime.model_copy(update={"learners": learners})
        threads = blas_threads(recipe.learning)
        with launcher.learners(runtime, threads, lambda: AGAIN, self.stop) as group:
            timed = Timed(group, self.clock)
            watch = _FromTheSecond(self.clock, lambda: timed.spent_s)
            begun = components.beginning(recipe, self.case.env)
            trainer = components.trainer(begun, fleet, watch, self.stop, "bench", None, timed)
            if not trainer.run():
                return None
            weights = policy_id(trainer.snapshot().policy)
        (began, *before), (ended, *after) = watch.marks[0], watch.marks[-1]
        learn_s, exchange_s, steps, updates = (b - a for a, b in zip(before, after, strict=True))
        return Learning(ended - began, learn_s, exchange_s, int(steps), int(updates), weights)


def shards_for(counts: Sequence[int], fewest: int) -> int:
    """The least number of shards, from `fewest` on, that all numbers of learners divide."""
    common = math.lcm(*counts)
    return common * -(-fewest // common)
