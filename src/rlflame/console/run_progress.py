"""Tracks the progress of each seed of a run or sweep, and the state of the fleet."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflame.console.base import RunStart
    from rlflame.console.recipe_summary import RecipeSummary
    from rlflame.fleet.base import FleetEvent

#: The number of episodes over which the recent return is averaged.
RECENT_EPISODES = 100
#: The speed is measured over this many iterations, including evaluations and checkpoints.
_RECENT_ITERATIONS = 50


class FleetProgress:
    """The current state of a fleet, whose events may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: For each purpose, the last event of each slot in this round.
        self._states: dict[str, dict[int, str]] = {"train": {}, "evaluate": {}}
        self.purpose = "train"
        #: The activity of the fleet before tasks run; empty while they run.
        self.phase = ""
        #: The number of workers that have answered; 0 on a fleet with a fixed number of workers.
        self.workers = 0
        self.retries = 0
        #: The number of training episodes by the name of the worker.
        self._episodes: Counter[str] = Counter()

    def add_event(self, event: FleetEvent) -> None:
        if event.kind == "phase":
            self.phase = event.text
        elif event.kind == "workers":
            self.workers = event.count
        elif event.kind == "episodes":
            with self._lock:
                self._episodes[event.text] += event.count
        self.retries += event.kind == "retried"
        if event.kind == "speculated" or not event.purpose:
            return
        with self._lock:
            self.purpose, states = event.purpose, self._states[event.purpose]
            # A slot that is submitted again starts the next round.
            if event.kind == "submitted" and event.slot in states:
                states.clear()
            # An event of a slot outside this round is a late event of the previous round.
            if event.kind == "submitted" or event.slot in states:
                states[event.slot] = event.kind

    def list_episodes(self) -> list[int]:
        """Return the number of training episodes of each worker, the smallest first."""
        with self._lock:
            return sorted(self._episodes.values())

    def count_tasks(self, kind: str = "") -> int:
        """Count the tasks of this round whose last event has this kind (all by default)."""
        with self._lock:
            return sum(kind in ("", state) for state in self._states[self.purpose].values())


@dataclass
class SeedProgress:
    """A seed's progress; `state` is waiting, running, finished, stopped or failed."""

    state: str = "waiting"
    steps: int = 0
    iteration: int = 0
    episodes: int = 0
    fraction_done: float = 0.0
    #: The steps and episodes that earlier processes completed.
    initial_counts: tuple[int, int] = (0, 0)
    #: The latest event of each kind.
    events: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    #: The mean return of the latest evaluation, or of the final one.
    score: float | None = None
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_EPISODES))
    #: Time and steps after each iteration.
    samples: deque[tuple[float, int]] = field(
        default_factory=lambda: deque(maxlen=_RECENT_ITERATIONS + 1)
    )

    @property
    def steps_per_s(self) -> float:
        """The recent speed; 0 if the seed is not running."""
        if self.state != "running" or not self.samples:
            return 0.0
        (start_s, start), (stop_s, stop) = self.samples[0], self.samples[-1]
        return (stop - start) / (stop_s - start_s) if stop_s > start_s else 0.0

    @property
    def recent_return(self) -> float | None:
        """The mean return of the latest episodes, with exploration."""
        return sum(self.returns) / len(self.returns) if self.returns else None


class RunProgress:
    """The progress of every seed of a run or sweep; `start` must be called first."""

    summary: RecipeSummary

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = clock()
        self._stop_s: float | None = None
        self.rows: dict[int, SeedProgress] = {}
        self.fleet = FleetProgress()
        self.is_sweep = False

    def start(self, start: RunStart) -> None:
        self._start_s = self._clock()
        self.summary, self.is_sweep = start.summary, start.resources is not None
        for seed, checkpoint in start.checkpoints.items():
            row = self.rows[seed] = SeedProgress()
            if checkpoint is not None:
                progress, record = checkpoint.progress, checkpoint.evaluation or checkpoint.best
                self._move(row, progress.steps, progress.iteration, progress.episodes)
                row.initial_counts = (progress.steps, progress.episodes)
                row.score = None if record is None else record.mean
            if seed in start.finished_seeds:
                row.state, row.fraction_done = "finished", 1.0
        self._initial_fraction = self.fraction_done
        if not self.is_sweep:
            self.row.returns.extend(start.returns)
            self.add_event({"event": "start", "steps": self.row.steps})

    def stop(self) -> None:
        """Stop measuring the elapsed time."""
        self._stop_s = self._clock()

    def add_returns(self, returns: Sequence[float]) -> None:
        """Add the returns of finished episodes. In a sweep, returns are not reported."""
        self.row.returns.extend(returns)

    def add_event(self, event: Mapping[str, Any], seed: int | None = None) -> None:
        """Add an event of `rlflame train --json`; outside a sweep, `seed` may be None."""
        row, name = self.row if seed is None else self.rows[seed], event["event"]
        row.events[name] = event
        if name == "start":
            # The process may continue from an older checkpoint if the latest is damaged.
            row.state, row.steps = "running", event["steps"]
            row.initial_counts = (row.steps, row.episodes)
        elif name == "iteration":
            self._move(row, event["steps"], event["iteration"], event["episodes"])
        elif name == "evaluation":
            row.score = event["mean"]
        elif name == "end" and event["complete"] and event["evaluation"]:
            row.score, row.fraction_done = event["evaluation"]["mean"], 1.0
        if name in ("start", "iteration"):
            row.samples.append((self._clock(), row.steps))

    def _move(self, row: SeedProgress, steps: int, iteration: int, episodes: int) -> None:
        row.steps, row.iteration, row.episodes = steps, iteration, episodes
        recipe, fractions = self.summary.recipe, []
        for count, end in ((steps, recipe.stop_at_steps), (iteration, recipe.stop_at_iterations)):
            fractions.append(count / end if end else 0.0)
        row.fraction_done = min(1.0, max(fractions))

    @property
    def row(self) -> SeedProgress:
        """The only seed of a run, or the first seed of a sweep."""
        return next(iter(self.rows.values()))

    @property
    def steps(self) -> int:
        return sum(row.steps for row in self.rows.values())

    @property
    def steps_per_s(self) -> float:
        return sum(row.steps_per_s for row in self.rows.values())

    @property
    def steps_since_start(self) -> int:
        """The number of steps since the start or, after a resume, since the resume."""
        return sum(row.steps - row.initial_counts[0] for row in self.rows.values())

    @property
    def episodes_since_start(self) -> int:
        return sum(row.episodes - row.initial_counts[1] for row in self.rows.values())

    @property
    def fraction_done(self) -> float:
        """The fraction of the budget that is spent."""
        return sum(row.fraction_done for row in self.rows.values()) / len(self.rows)

    @property
    def elapsed_s(self) -> float:
        return (self._clock() if self._stop_s is None else self._stop_s) - self._start_s

    @property
    def remaining_s(self) -> float | None:
        """The estimated time until the budget is spent, at the speed since the start."""
        rows = [row for row in self.rows.values() if row.state in ("waiting", "running")]
        remaining = sum(1.0 - row.fraction_done for row in rows)
        gain = (self.fraction_done - self._initial_fraction) * len(self.rows)
        return self.elapsed_s * remaining / gain if gain > 0.0 and rows else None

    @property
    def final_return(self) -> float | None:
        """The mean return of recent episodes.

        If iterations consist of whole episodes, only the latest iteration counts.
        """
        if not self.rows:
            return None
        if self.summary.episodes_per_iteration:
            mean: float | None = self.row.events.get("iteration", {}).get("episode_return_mean")
            return mean
        return self.row.recent_return
