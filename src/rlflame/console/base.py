"""What runs tell their view: the contract, its null object, and how a run starts and ends.

A sweep of several seeds tells the same view as a run of one seed.
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
    """How the seeds of a sweep share a machine."""

    concurrent_seeds: int
    #: Worker processes of each seed; 0 where a seed steps its environments in its own process.
    workers_per_seed: int
    #: Whether memory, not processors, decides how many seeds run at once.
    memory_bound: bool = False


@dataclass(frozen=True)
class RunStart:
    """What is about to run."""

    folder: Path
    summary: RecipeSummary
    #: The checkpoint that each seed continues from; None for a seed that has none.
    checkpoints: Mapping[int, Checkpoint | None]
    fleet: str
    workers: int
    is_resume: bool
    #: `--fleet auto` looked for a cluster and found none configured.
    no_cluster: bool = False
    #: Names and capacities of the fleets that take turns until one of them is chosen.
    candidates: tuple[tuple[str, int], ...] = ()
    #: None for a run of one seed.
    resources: SweepResources | None = None
    #: Seeds of a sweep that an earlier process has finished.
    finished_seeds: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RunResult:
    """How a run of one seed ended."""

    folder: Path
    progress: Progress
    complete: bool
    #: False where a resumed run was finished already, and nothing had to be done.
    has_trained: bool
    state_digest: str
    digest: str
    evaluation: EvaluationRecord | None
    best: EvaluationRecord | None
    #: The command that continues the run.
    resume_command: str
    #: The command that scores its best policy.
    evaluation_command: str


@dataclass(frozen=True)
class SweepResult:
    """How a sweep ended."""

    folder: Path
    summary: SweepSummary
    outcomes: Mapping[int, SeedOutcome]
    #: False where all seeds were finished already.
    has_trained: bool
    #: The picture, where one could be drawn.
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
    """The contract of a display. A sweep alone calls the methods that name a seed."""

    def open(self, start: RunStart) -> AbstractContextManager[None]:
        """Entered before the first iteration, and left after the last one."""
        del start
        return nullcontext()

    def show_note(self, text: str) -> None: ...

    def show_iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None: ...

    def show_evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None: ...

    def show_checkpoint(self, path: Path, progress: Progress) -> None: ...

    def show_fleet_event(self, event: FleetEvent) -> None:
        """Called from any thread."""

    def show_seed_start(self, seed: int) -> None:
        """The process of a seed starts; its first event comes seconds later."""

    def show_seed_event(self, seed: int, event: Mapping[str, Any]) -> None:
        """An event of a seed's process, as `rlflame train --json` prints it."""

    def show_seed_end(self, seed: int, outcome: SeedOutcome) -> None: ...

    def show_result(self, result: RunResult | SweepResult) -> None: ...


class NullView(RunView):
    """Shows nothing; a view that shows little begins here."""
