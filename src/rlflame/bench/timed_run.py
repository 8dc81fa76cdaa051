"""One case on one fleet, timed: the loop, the learner and the workers that training has.

Must not know: other fleets, how many repetitions there are, how anything is shown.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlflame.bench.base import Case, Repetition
from rlflame.config.recipe import Recipe
from rlflame.experiment import components
from rlflame.fleet.base import Fleet, make_policy_id
from rlflame.rollout.spec import Fragment
from rlflame.training.trainer import Progress, StopRequest

Clock = Callable[[], float]
#: After every iteration.
IterationCallback = Callable[[Progress], None]
#: How long a fleet may take until all its workers have answered.
_COMPLETE_S = 30.0


class Stopwatch:
    """A recorder that keeps nothing but where the time went."""

    def __init__(self, clock: Clock, on_iteration: IterationCallback | None = None) -> None:
        self._clock = clock
        self._on_iteration = on_iteration or (lambda progress: None)
        self.spent_s: dict[str, float] = {}
        self.progress = Progress()
        self.metrics: dict[str, Any] = {}

    def record_iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        returns = [e.episode_return for fragment in fragments for e in fragment.episodes]
        self.progress = progress
        self.metrics = dict(metrics)
        if returns:
            self.metrics["mean_return"] = sum(returns) / len(returns)
        self._on_iteration(progress)

    def record_evaluation(self, *_: Any) -> None:
        """There is none: the case has none."""

    def record_snapshot(self, *_: Any, final: bool = False) -> None:
        """Nothing is written."""

    @contextlib.contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        start_s = self._clock()
        try:
            yield
        finally:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + self._clock() - start_s


def run_once(
    case: Case,
    fleet: Fleet,
    stop: StopRequest,
    clock: Clock = time.perf_counter,
    on_iteration: IterationCallback | None = None,
) -> Repetition | None:
    """The case from its beginning to its end; None where it was stopped before."""
    return _run(case, case.recipe, fleet, stop, clock, on_iteration)


def warm(
    case: Case,
    fleet: Fleet,
    stop: StopRequest,
    clock: Clock = time.perf_counter,
    *,
    wait_for_all: bool = False,
) -> bool:
    """One iteration that does not count; more of them until every worker has answered."""
    once = case.recipe.model_copy(update={"stop_at_iterations": 1})
    start_s = clock()
    while _run(case, once, fleet, stop, clock) is not None:
        enough = not wait_for_all or count_answered_workers(fleet) >= min(
            fleet.capacity, case.tasks
        )
        if enough or clock() - start_s > _COMPLETE_S:
            return True
    return False


def count_answered_workers(fleet: Fleet) -> int:
    return len(fleet.probe().workers)


def _run(
    case: Case,
    recipe: Recipe,
    fleet: Fleet,
    stop: StopRequest,
    clock: Clock,
    on_iteration: IterationCallback | None = None,
) -> Repetition | None:
    watch = Stopwatch(clock, on_iteration)
    trainer = components.make_trainer(
        components.make_initial_checkpoint(recipe, case.env), fleet, watch, stop, "bench"
    )
    start_s = clock()
    complete = trainer.run()
    seconds = clock() - start_s
    if not complete:
        return None
    return Repetition(
        seconds=seconds,
        collect_s=watch.spent_s.get("collect", 0.0),
        learn_s=watch.spent_s.get("learn", 0.0),
        steps=watch.progress.steps,
        episodes=watch.progress.episodes,
        final_return=watch.metrics.get("mean_return"),
        weights=make_policy_id(trainer.take_snapshot().policy),
    )
