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

from rlflame.console.recipe_summary import Facts

if TYPE_CHECKING:
    from rlflame.console.base import RunStart
    from rlflame.fleet.base import FleetEvent
    from rlflame.training.evaluation import EvaluationRecord

#: Episodes in the return so far.
RECENT_EPISODES = 100
#: Iterations over which the speed is taken; evaluations and checkpoints among them count.
_RECENT_ITERATIONS = 50


class FanOut:
    """The tasks of one purpose under way, by slot, and the retries of the whole run.

    A slot that is submitted again begins the next round; an event of the round before that comes
    late is then one of a slot that will be told of again, and does no harm.
    """

    def __init__(self) -> None:
        self._submitted: set[int] = set()
        self._running: set[int] = set()
        self._finished: set[int] = set()
        self.retried = self.retried_in_all = self.speculated = 0

    def event(self, kind: str, slot: int) -> None:
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
            self.retried_in_all += 1

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
class Evaluated:
    """The last evaluation."""

    steps: int
    record: EvaluationRecord
    best: bool


class Board:
    """A run so far, as this process has seen it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._fanouts = {"train": FanOut(), "evaluate": FanOut()}
        self._now = "train"
        self._returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._marks: deque[tuple[float, int, float]] = deque(maxlen=_RECENT_ITERATIONS + 1)
        self._began_at = clock()
        self._before = (0, 0)
        self.facts: Facts | None = None
        self.steps = self.iteration = self.episodes = 0
        self.metrics: dict[str, Any] = {}
        self.evaluated: Evaluated | None = None
        #: What the fleet does before tasks run; empty while they do.
        self.phase = ""
        #: That have answered so far, on a fleet where they come and go; else 0.
        self.workers = 0

    def begin(self, run: RunStart) -> None:
        progress = run.checkpoint.progress
        self.facts = Facts(run.checkpoint.recipe, run.checkpoint.env, run.preset)
        self.steps, self.iteration = progress.steps, progress.iteration
        self.episodes = progress.episodes
        self._before = (progress.steps, progress.episodes)
        self._began_at = self._clock()
        self._marks.append((self._began_at, self.steps, self.share))

    def learned(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        """An iteration is over."""
        self.metrics = metrics
        self.steps, self.iteration = metrics["steps"], metrics["iteration"]
        self.episodes = metrics["episodes"]
        self._returns.extend(returns)
        self._marks.append((self._clock(), self.steps, self.share))

    def fleet(self, event: FleetEvent) -> None:
        if event.kind == "phase":
            self.phase = event.text
        elif event.kind == "workers":
            self.workers = int(event.text)
        if not event.purpose:
            return
        with self._lock:
            self._now = event.purpose
            self._fanouts[event.purpose].event(event.kind, event.slot)

    @property
    def evaluating(self) -> bool:
        return self._now == "evaluate"

    @property
    def fanout(self) -> FanOut:
        """Of what the fleet does now."""
        return self._fanouts[self._now]

    @property
    def retried_in_all(self) -> int:
        return sum(fanout.retried_in_all for fanout in self._fanouts.values())

    @property
    def recent_return(self) -> float | None:
        """Mean of the last episodes, with exploration."""
        return sum(self._returns) / len(self._returns) if self._returns else None

    @property
    def final_return(self) -> float | None:
        """REINFORCE is told by its last iteration, as its example does; others by the last 100."""
        if self.facts and self.facts.episodes_per_iteration:
            mean: float | None = self.metrics.get("episode_return_mean")
            return mean
        return self.recent_return

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_at

    @property
    def own_steps(self) -> int:
        """Taken by this process, as opposed to those before a resume."""
        return self.steps - self._before[0]

    @property
    def own_episodes(self) -> int:
        return self.episodes - self._before[1]

    @property
    def share(self) -> float:
        """How much of the budget is spent, from 0 to 1."""
        assert self.facts is not None
        recipe = self.facts.recipe
        shares = [0.0]
        if recipe.stop_at_steps:
            shares.append(self.steps / recipe.stop_at_steps)
        if recipe.stop_at_iterations:
            shares.append(self.iteration / recipe.stop_at_iterations)
        return min(1.0, max(shares))

    @property
    def steps_per_s(self) -> float:
        (start, before, _), (end, now, _) = self._marks[0], self._marks[-1]
        return (now - before) / (end - start) if end > start else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Until the budget is spent, at the recent speed."""
        (start, _, before), (end, _, now) = self._marks[0], self._marks[-1]
        return (1.0 - now) * (end - start) / (now - before) if now > before else None
