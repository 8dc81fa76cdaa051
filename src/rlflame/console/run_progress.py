"""What is known of a run at this moment: counters and rates, for whoever shows them.

Is told of fleet events by other threads. Must not know: how it is shown.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlflame.console.recipe_summary import RecipeSummary

if TYPE_CHECKING:
    from rlflame.console.base import RunStart
    from rlflame.fleet.base import FleetEvent
    from rlflame.training.evaluation import EvaluationRecord

#: Episodes in the return so far.
RECENT_EPISODES = 100
#: Iterations over which the speed is taken; evaluations and checkpoints among them count.
_RECENT_ITERATIONS = 50


class TaskCounts:
    """The tasks of one purpose under way, by slot, and the retries of the whole run.

    A slot that is submitted again begins the next round; an event of the round before that comes
    late is then one of a slot that will be told of again, and does no harm.
    """

    def __init__(self) -> None:
        self._submitted: set[int] = set()
        self._running: set[int] = set()
        self._finished: set[int] = set()
        self.retried = self.total_retried = self.speculated = 0

    def add_event(self, kind: str, slot: int) -> None:
        if kind == "submitted" and slot in self._submitted:
            self._submitted, self._running, self._finished = set(), set(), set()
            self.retried = self.speculated = 0
        if kind == "speculated":
            self.speculated += 1
            return
        self._running.discard(slot)
        if kind == "submitted":
            self._submitted.add(slot)
        elif kind == "running":
            self._running.add(slot)
        elif kind == "done":
            self._finished.add(slot)
        elif kind == "retried":
            self.retried += 1
            self.total_retried += 1

    @property
    def submitted(self) -> int:
        return len(self._submitted)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def finished(self) -> int:
        return len(self._finished)


@dataclass(frozen=True, slots=True)
class LatestEvaluation:
    """The last evaluation."""

    steps: int
    record: EvaluationRecord
    best: bool


class RunProgress:
    """A run so far, as this process has seen it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._task_counts = {"train": TaskCounts(), "evaluate": TaskCounts()}
        self._purpose = "train"
        self._returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=_RECENT_ITERATIONS + 1)
        self._start_s = clock()
        self._initial_counts = (0, 0)
        self.recipe_summary: RecipeSummary | None = None
        self.steps = self.iteration = self.episodes = 0
        self.metrics: dict[str, Any] = {}
        self.latest_evaluation: LatestEvaluation | None = None
        #: What the fleet does before tasks run; empty while they do.
        self.phase = ""
        #: That have answered so far, on a fleet where they come and go; else 0.
        self.workers = 0

    def start(self, run: RunStart) -> None:
        progress = run.checkpoint.progress
        self.recipe_summary = RecipeSummary(run.checkpoint.recipe, run.checkpoint.env, run.preset)
        self.steps, self.iteration = progress.steps, progress.iteration
        self.episodes = progress.episodes
        self._initial_counts = (progress.steps, progress.episodes)
        self._start_s = self._clock()
        self._samples.append((self._start_s, self.steps, self.fraction_done))

    def add_iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        """An iteration is over."""
        self.metrics = metrics
        self.steps, self.iteration = metrics["steps"], metrics["iteration"]
        self.episodes = metrics["episodes"]
        self._returns.extend(returns)
        self._samples.append((self._clock(), self.steps, self.fraction_done))

    def add_fleet_event(self, event: FleetEvent) -> None:
        if event.kind == "phase":
            self.phase = event.text
        elif event.kind == "workers":
            self.workers = int(event.text)
        if not event.purpose:
            return
        with self._lock:
            self._purpose = event.purpose
            self._task_counts[event.purpose].add_event(event.kind, event.slot)

    @property
    def is_evaluating(self) -> bool:
        return self._purpose == "evaluate"

    @property
    def task_counts(self) -> TaskCounts:
        """Of what the fleet does now."""
        return self._task_counts[self._purpose]

    @property
    def total_retried(self) -> int:
        return sum(counts.total_retried for counts in self._task_counts.values())

    @property
    def recent_return(self) -> float | None:
        """Mean of the last episodes, with exploration."""
        return sum(self._returns) / len(self._returns) if self._returns else None

    @property
    def final_return(self) -> float | None:
        """REINFORCE is told by its last iteration, as its example does; others by the last 100."""
        if self.recipe_summary and self.recipe_summary.episodes_per_iteration:
            mean: float | None = self.metrics.get("episode_return_mean")
            return mean
        return self.recent_return

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    @property
    def steps_since_start(self) -> int:
        """Taken by this process, as opposed to those before a resume."""
        return self.steps - self._initial_counts[0]

    @property
    def episodes_since_start(self) -> int:
        return self.episodes - self._initial_counts[1]

    @property
    def fraction_done(self) -> float:
        """How much of the budget is spent, from 0 to 1."""
        assert self.recipe_summary is not None
        recipe = self.recipe_summary.recipe
        fractions = [0.0]
        if recipe.stop_at_steps:
            fractions.append(self.steps / recipe.stop_at_steps)
        if recipe.stop_at_iterations:
            fractions.append(self.iteration / recipe.stop_at_iterations)
        return min(1.0, max(fractions))

    @property
    def steps_per_s(self) -> float:
        (start, first_steps, _), (end, last_steps, _) = self._samples[0], self._samples[-1]
        return (last_steps - first_steps) / (end - start) if end > start else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Until the budget is spent, at the recent speed."""
        (start, _, first_fraction), (end, _, last_fraction) = self._samples[0], self._samples[-1]
        return (
            (1.0 - last_fraction) * (end - start) / (last_fraction - first_fraction)
            if last_fraction > first_fraction
            else None
        )
