"""What is known of a run at this moment: counters and rates for whoever shows them.

Told of events from any thread. Must not know: how it is shown.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflame.api import RunStart
    from rlflame.evaluate import EvaluationRecord
    from rlflame.fleet import FleetEvent

#: Episodes in the "return so far".
RECENT_EPISODES = 100
#: Iterations over which the speed is taken.
_RECENT_ITERATIONS = 20


class Fanout:
    """The tasks of one purpose under way: this iteration's, and the retries of the whole run."""

    def __init__(self) -> None:
        self.submitted = self.running = self.done = self.retried = self.retried_in_all = 0
        self._submitting = False

    def event(self, kind: str) -> None:
        if kind == "submitted" and not self._submitting:
            self.submitted = self.running = self.done = self.retried = 0
        self._submitting = kind == "submitted"
        if kind == "submitted":
            self.submitted += 1
        elif kind == "running":
            self.running += 1
        elif kind == "done":
            self.done += 1
            self.running -= 1
        elif kind == "retried":
            self.retried += 1
            self.retried_in_all += 1
            self.running -= 1


class Board:
    """A run so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.run: RunStart | None = None
        self.metrics: dict[str, Any] = {}
        self.returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.last_returns: Sequence[float] = ()
        self.evaluated: tuple[int, EvaluationRecord, bool] | None = None
        self.fanouts = {"train": Fanout(), "evaluate": Fanout()}
        self.evaluating = False
        self._marks: deque[tuple[float, int]] = deque(maxlen=_RECENT_ITERATIONS + 1)
        self._begun_at = clock()
        self._first = (0, 0)

    def begin(self, run: RunStart) -> None:
        self.run = run
        progress = run.checkpoint.progress
        self.metrics = {
            "steps": progress.steps,
            "iteration": progress.iteration,
            "episodes": progress.episodes,
        }
        self._begun_at = self._clock()
        self._first = (progress.steps, progress.episodes)
        self._marks.append((self._begun_at, progress.steps))

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        self.metrics = metrics
        self.last_returns = returns
        self.returns.extend(returns)
        self._marks.append((self._clock(), metrics["steps"]))

    def fleet(self, event: FleetEvent) -> None:
        with self._lock:
            self.evaluating = event.purpose == "evaluate"
            self.fanouts[event.purpose].event(event.kind)

    @property
    def recent_return(self) -> float | None:
        """Mean of the last episodes."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._begun_at

    @property
    def steps_per_s(self) -> float:
        """Over the last iterations; evaluations and checkpoints included, as in the ETA."""
        (start, before), (end, now) = self._marks[0], self._marks[-1]
        return (now - before) / (end - start) if end > start else 0.0

    @property
    def own_steps(self) -> int:
        """Steps since this process began."""
        return int(self.metrics["steps"]) - self._first[0]

    @property
    def own_episodes(self) -> int:
        return int(self.metrics["episodes"]) - self._first[1]

    @property
    def share(self) -> float:
        """How much of the budget is spent, from 0 to 1."""
        assert self.run is not None
        recipe = self.run.checkpoint.recipe
        shares = [0.0]
        if recipe.stop_at_steps:
            shares.append(self.metrics["steps"] / recipe.stop_at_steps)
        if recipe.stop_at_iterations:
            shares.append(self.metrics["iteration"] / recipe.stop_at_iterations)
        return min(1.0, max(shares))

    @property
    def remaining_s(self) -> float | None:
        """Until the budget is spent, at the recent speed."""
        (start, before), (end, now) = self._marks[0], self._marks[-1]
        share = self.share
        if now <= before or share <= 0.0:
            return None
        speed = (now - before) / (end - start) if end > start else 0.0
        total = self.metrics["steps"] / share
        return (total - self.metrics["steps"]) / speed if speed else None
