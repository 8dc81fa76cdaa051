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

from rlflame.statistics import compute_interquartile_means
from rlflame.storage.sweep_result import SeedOutcome

_RECENT_SAMPLES = 50


@dataclass
class SeedProgress:
    """One seed. `get_state` is waiting, running, finished, stopped or failed."""

    seed: int
    state: str = "waiting"
    steps: int = 0
    episodes: int = 0
    fraction_done: float = 0.0
    #: Mean return of its last evaluation, the final one once there is one, and when it was.
    evaluation: float | None = None
    evaluation_step: int = 0
    error: str = ""
    samples: deque[tuple[float, int]] = field(
        default_factory=lambda: deque(maxlen=_RECENT_SAMPLES + 1)
    )
    #: Steps it had when this process began with it.
    initial_steps: int = 0

    @property
    def steps_per_s(self) -> float:
        if self.state != "running" or len(self.samples) < 2:
            return 0.0
        (start, first_steps), (end, last_steps) = self.samples[0], self.samples[-1]
        return (last_steps - first_steps) / (end - start) if end > start else 0.0


class SweepProgress:
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
        self._limits = (stop_at_steps, stop_at_iterations)
        self._start_s = clock()
        self.rows = {seed: SeedProgress(seed) for seed in seeds}
        #: What the fleet does before tasks run, and how many executors have answered.
        self.phase = ""
        self.workers = 0

    def restore_seed(self, seed: int, steps: int, state: str, evaluation: float | None) -> None:
        """Where a seed stood when the job went on."""
        row = self.rows[seed]
        row.state, row.steps, row.initial_steps = state, steps, steps
        row.evaluation, row.evaluation_step = evaluation, steps
        row.fraction_done = 1.0 if state == "finished" else self._compute_fraction(steps, 0)

    def mark_running(self, seed: int) -> None:
        self.rows[seed].state = "running"

    def add_event(self, seed: int, event: Mapping[str, Any]) -> None:
        row, name = self.rows[seed], event.get("event")
        if name in ("start", "iteration"):
            row.steps = event["steps"]
            row.fraction_done = self._compute_fraction(row.steps, event.get("iteration") or 0)
            row.samples.append((self._clock(), row.steps))
            if name == "start":
                row.initial_steps = row.steps
        elif name == "evaluation":
            row.evaluation, row.evaluation_step = event["mean"], event["steps"]
        elif name == "end" and event["complete"] and event["evaluation"]:
            row.evaluation, row.evaluation_step = event["evaluation"]["mean"], event["steps"]
            row.fraction_done = 1.0

    def add_outcome(self, seed: int, outcome: SeedOutcome) -> None:
        row = self.rows[seed]
        row.state = outcome.end
        row.error = outcome.error.message if outcome.error is not None else ""

    def _compute_fraction(self, steps: int, iteration: int) -> float:
        stop_at_steps, stop_at_iterations = self._limits
        fractions = [0.0]
        if stop_at_steps:
            fractions.append(steps / stop_at_steps)
        if stop_at_iterations:
            fractions.append(iteration / stop_at_iterations)
        return min(1.0, max(fractions))

    def count_seeds(self, state: str) -> int:
        return sum(row.state == state for row in self.rows.values())

    @property
    def steps(self) -> int:
        return sum(row.steps for row in self.rows.values())

    @property
    def steps_since_start(self) -> int:
        """Taken since this process began."""
        return sum(row.steps - row.initial_steps for row in self.rows.values())

    @property
    def fraction_done(self) -> float:
        return sum(row.fraction_done for row in self.rows.values()) / len(self.rows)

    @property
    def steps_per_s(self) -> float:
        return sum(row.steps_per_s for row in self.rows.values())

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    @property
    def remaining_s(self) -> float | None:
        """Until the last step, at the speed since this process began."""
        step_limit = self._limits[0]
        if step_limit is None or not self.steps_since_start:
            return None
        end_states = ("finished", "failed", "stopped")
        remaining_steps = sum(
            max(0, step_limit - row.steps)
            for row in self.rows.values()
            if row.state not in end_states
        )
        return remaining_steps * self.elapsed_s / self.steps_since_start

    @property
    def iqm(self) -> tuple[float, int] | None:
        """Interquartile mean of the seeds' last evaluations, and of how many seeds."""
        evaluations = [row.evaluation for row in self.rows.values() if row.evaluation is not None]
        if not evaluations:
            return None
        return float(compute_interquartile_means(np.array(evaluations, np.float64))), len(
            evaluations
        )
