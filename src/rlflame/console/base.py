"""The interface between runs and displays: events, results and a null display.

A sweep of several seeds uses the same interface as a run of one seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflame.console.recipe_summary import RecipeSummary
    from rlflame.errors import RlflameError
    from rlflame.fleet.base import FleetEvent
    from rlflame.storage.checkpoint import Checkpoint
    from rlflame.storage.sweep_folder import SeedOutcome, SweepSummary
    from rlflame.training.evaluation import EvaluationRecord
    from rlflame.training.trainer import Progress


@dataclass(frozen=True, slots=True)
class SweepResources:
    """How a sweep divides this machine among its seeds."""

    concurrent_seeds: int
    #: Worker processes of each seed; 0 if a seed steps its environments in its own process.
    workers_per_seed: int
    #: Whether memory, rather than the number of cores, limits how many seeds run at once.
    memory_bound: bool = False


@dataclass(frozen=True)
class RunStart:
    """Information about a run that is about to start."""

    folder: Path
    summary: RecipeSummary
    #: The checkpoint that each seed continues from; None for a seed without one.
    checkpoints: Mapping[int, Checkpoint | None]
    fleet: str
    workers: int
    is_resume: bool
    #: The returns of the latest episodes before a resume.
    returns: Sequence[float] = ()
    #: True if `--fleet auto` found no configured cluster.
    no_cluster: bool = False
    #: The names and capacities of the fleets that `--fleet auto` compares.
    candidates: tuple[tuple[str, int], ...] = ()
    #: The resources of a sweep; None for a run of one seed.
    resources: SweepResources | None = None
    #: The seeds of a sweep that an earlier process has finished.
    finished_seeds: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RunResult:
    """The result of a run of one seed."""

    folder: Path
    progress: Progress
    complete: bool
    #: False if a resumed run was already finished.
    has_trained: bool
    state_digest: str
    digest: str
    evaluation: EvaluationRecord | None
    best: EvaluationRecord | None
    #: The command that continues the run.
    resume_command: str
    #: The command that evaluates the best policy of the run.
    evaluation_command: str


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep."""

    folder: Path
    summary: SweepSummary
    outcomes: Mapping[int, SeedOutcome]
    #: False if all seeds were already finished.
    has_trained: bool
    #: The image file; None if no plot could be drawn.
    plot: Path | None

    @property
    def complete(self) -> bool:
        return self.summary.complete

    @property
    def failures(self) -> dict[int, RlflameError]:
        return {
            seed: outcome.error
            for seed, outcome in self.outcomes.items()
            if outcome.error is not None
        }


class RunView:
    """The interface of a display. Only a sweep calls the methods with a `seed`."""

    def open(self, start: RunStart) -> AbstractContextManager[None]:
        """Return a context manager that keeps the display open during the run."""
        del start
        return nullcontext()

    def show_note(self, text: str) -> None: ...

    def show_iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None: ...

    def show_evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None: ...

    def show_checkpoint(self, path: Path, progress: Progress) -> None: ...

    def show_fleet_event(self, event: FleetEvent) -> None:
        """Show an event of the fleet; may be called from any thread."""

    def show_seed_start(self, seed: int) -> None:
        """Show that a seed's process is starting; its first event arrives seconds later."""

    def show_seed_event(self, seed: int, event: Mapping[str, Any]) -> None:
        """Show an event of a seed's process, in the form of `rlflame train --json`."""

    def show_seed_end(self, seed: int, outcome: SeedOutcome) -> None: ...

    def show_result(self, result: RunResult | SweepResult) -> None: ...


class NullView(RunView):
    """A display that shows nothing, and the base class of displays that show little."""
