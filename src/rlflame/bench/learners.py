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
from rlflame.bench.timed_run import Clock, Stopwatch
from rlflame.config.runtime import RuntimeSettings
from rlflame.experiment import components
from rlflame.experiment.learners import launcher
from rlflame.experiment.run_settings import check_learners
from rlflame.fleet.base import Fleet, make_policy_id
from rlflame.learning.factory import count_blas_threads
from rlflame.learning.parallel.process_group import ProcessGroup
from rlflame.rollout.spec import Float32, Fragment
from rlflame.terminal_text import format_count
from rlflame.training.trainer import Progress, StopRequest

#: What to do when a learner was lost.
RETRY_HINT = "the same command measures anew"


@dataclass(frozen=True, slots=True)
class LearningRun:
    """One run, without its first iteration, in which everybody warms up."""

    seconds: float
    learn_s: float
    #: Of learning: giving and taking batches and gradients, waiting for the others included.
    exchange_s: float
    steps: int
    updates: int
    weights: str


@dataclass(slots=True)
class LearnerSide:
    """One number of learners."""

    learners: int
    runs: list[LearningRun] = field(default_factory=list)


class TimedProcessGroup:
    """A group whose exchanges are timed, on the first learner's clock."""

    def __init__(self, group: ProcessGroup, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self.rank, self.size = group.rank, group.size
        self.spent_s = 0.0

    def gather(self, values: Float32) -> Float32:
        start_s = self._clock()
        result = self._group.gather(values)
        self.spent_s += self._clock() - start_s
        return result

    def use_device(self, device: str) -> None:
        self._group.use_device(device)

    def broadcast(self, value: Any) -> Any:
        start_s = self._clock()
        result = self._group.broadcast(value)
        self.spent_s += self._clock() - start_s
        return result


class _LearningStopwatch(Stopwatch):
    """A stopwatch that says how things stood when the first iteration was over."""

    def __init__(self, clock: Clock, exchanged_s: Callable[[], float]) -> None:
        super().__init__(clock)
        self._exchanged_s = exchanged_s
        self.marks: list[tuple[float, float, float, int, float]] = []

    def record_iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        super().record_iteration(progress, metrics, fragments)
        learn_s = self.spent_s.get("learn", 0.0)
        updates = float(metrics.get("n_updates", 0.0))
        mark = (self._clock(), learn_s, self._exchanged_s(), progress.steps, updates)
        self.marks.append(mark)


@dataclass
class LearnersBenchmark:
    """`sides` grows while it runs; the numbers of learners take turns."""

    case: Case
    counts: Sequence[int]
    repeat: int
    runtime: RuntimeSettings
    open: Callable[[], AbstractContextManager[Fleet]]
    stop: StopRequest
    show_status: Callable[[str], None] = lambda text: None
    clock: Clock = time.perf_counter
    sides: list[LearnerSide] = field(default_factory=list)

    def run(self) -> bool:
        """False where somebody asked to stop before the end."""
        for learners in self.counts:
            check_learners(self.case.recipe.learning, learners)
        self.sides += [LearnerSide(learners) for learners in self.counts]
        with self.open() as fleet:
            for number in range(self.repeat):
                for side in self.sides:
                    self.show_status(
                        f"{format_count(side.learners, 'learner')}: {number + 1} of {self.repeat}"
                    )
                    learning_run = self._run_once(side.learners, fleet)
                    if learning_run is None:
                        return False
                    side.runs.append(learning_run)
        return True

    def _run_once(self, learners: int, fleet: Fleet) -> LearningRun | None:
        recipe = self.case.recipe
        runtime = self.runtime.model_copy(update={"learners": learners})
        threads = count_blas_threads(recipe.learning)
        with launcher.start_learners(runtime, threads, lambda: RETRY_HINT, self.stop) as group:
            timed = TimedProcessGroup(group, self.clock)
            watch = _LearningStopwatch(self.clock, lambda: timed.spent_s)
            initial = components.make_initial_checkpoint(recipe, self.case.env)
            trainer = components.make_trainer(
                initial, fleet, watch, self.stop, "bench", None, timed
            )
            if not trainer.run():
                return None
            weights = make_policy_id(trainer.take_snapshot().policy)
        (start_s, *before), (ended, *after) = watch.marks[0], watch.marks[-1]
        learn_s, exchange_s, steps, updates = (b - a for a, b in zip(before, after, strict=True))
        return LearningRun(ended - start_s, learn_s, exchange_s, int(steps), int(updates), weights)


def find_shard_count(counts: Sequence[int], fewest: int) -> int:
    """The least number of shards, from `fewest` on, that all numbers of learners divide."""
    common = math.lcm(*counts)
    return common * -(-fewest // common)
