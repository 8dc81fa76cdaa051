"""What is known of a job's seeds at this moment, for whoever shows them.

Must not know: how it is shown.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlflame.statistics import interquartile_means
from rlflame.storage.sweep_result import Outcome

_RECENT = 50


@dataclass
class Row:
    """One seed. `state` is waiting, running, finished, stopped or failed."""

    seed: int
    state: str = "waiting"
    steps: int = 0
    episodes: int = 0
    share: float = 0.0
    #: Mean return of its last evaluation, the final one once there is one, and when it was.
    evaluation: float | None = None
    evaluated_at: int = 0
    error: str = ""
    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RECENT + 1))
    #: Steps it had when this process began with it.
    before: int = 0

    @property
    def steps_per_s(self) -> float:
        if self.state != "running" or len(self.marks) < 2:
            return 0.0
        (start, before), (end, now) = self.marks[0], self.marks[-1]
        return (now - before) / (end - start) if end > start else 0.0


class SeedsBoard:
    """All of them, told by the job as things happen."""

    def __init__(
        self,
        seeds: Sequence[int],
        *,
        stop_at_steps: int | None,
        stop_at_iterations: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._goals = (stop_at_steps, stop_at_iterations)
        self._began_at = clock()
        self.rows = {seed: Row(seed) for seed in seeds}
        #: What the fleet does before tasks run, and how many executors have answered.
        self.phase = ""
        self.workers = 0

    def stands(self, seed: int, steps: int, state: str, evaluation: float | None) -> None:
        """Where a seed stood when the job went on."""
        row = self.rows[seed]
        row.state, row.steps, row.before = state, steps, steps
        row.evaluation, row.evaluated_at = evaluation, steps
        row.share = 1.0 if state == "finished" else self._share(steps, 0)

    def begun(self, seed: int) -> None:
        self.rows[seed].state = "running"

    def event(self, seed: int, event: Mapping[str, Any]) -> None:
        row, name = self.rows[seed], event.get("event")
        if name in ("start", "iteration"):
            row.steps = event["steps"]
            row.share = self._share(row.steps, event.get("iteration") or 0)
            row.marks.append((self._clock(), row.steps))
            if name == "start":
                row.before = row.steps
        elif name == "evaluation":
            row.evaluation, row.evaluated_at = event["mean"], event["steps"]
        elif name == "end" and event["complete"] and event["evaluation"]:
            row.evaluation, row.evaluated_at = event["evaluation"]["mean"], event["steps"]
            row.share = 1.0

    def ended(self, seed: int, outcome: Outcome) -> None:
        row = self.rows[seed]
        row.state = outcome.end
        row.error = outcome.error.message if outcome.error is not None else ""

    def _share(self, steps: int, iteration: int) -> float:
        stop_at_steps, stop_at_iterations = self._goals
        shares = [0.0]
        if stop_at_steps:
            shares.append(steps / stop_at_steps)
        if stop_at_iterations:
            shares.append(iteration / stop_at_iterations)
        return min(1.0, max(shares))

    def number(self, state: str) -> int:
        return sum(row.state == state for row in self.rows.values())

    @property
    def steps(self) -> int:
        return sum(row.steps for row in self.rows.values())

    @property
    def own_steps(self) -> int:
        """Taken since this process began."""
        return sum(row.steps - row.before for row in self.rows.values())

    @property
    def share(self) -> float:
        return sum(row.share for row in self.rows.values()) / len(self.rows)

    @property
    def steps_per_s(self) -> float:
        return sum(row.steps_per_s for row in self.rows.values())

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_at

    @property
    def remaining_s(self) -> float | None:
        """Until the last step, at the speed since this process began."""
        goal = self._goals[0]
        if goal is None or not self.own_steps:
            return None
        ended = ("finished", "failed", "stopped")
        left = sum(max(0, goal - row.steps) for row in self.rows.values() if row.state not in ended)
        return left * self.elapsed_s / self.own_steps

    @property
    def iqm(self) -> tuple[float, int] | None:
        """Interquartile mean of the seeds' last evaluations, and of how many seeds."""
        found = [row.evaluation for row in self.rows.values() if row.evaluation is not None]
        if not found:
            return None
        return float(interquartile_means(np.array(found, np.float64))), len(found)
