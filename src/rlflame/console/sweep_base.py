"""What a job of seeds tells whoever shows it. Must not know: how it is shown, how it is run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlflame.console.recipe_summary import RecipeSummary
from rlflame.console.sweep_progress import SweepProgress
from rlflame.errors import RlflameError
from rlflame.storage.sweep_result import SeedOutcome, SweepSummary


@dataclass(frozen=True, slots=True)
class SweepResources:
    """`workers_per_seed` are each seed's own; 0 where it steps its environments in its own
    process."""

    concurrent_seeds: int
    workers_per_seed: int
    #: Whether memory, not processors, decides how many there are at once.
    memory_bound: bool = False


@dataclass(frozen=True)
class SweepStart:
    """What is about to run."""

    folder: Path
    recipe_summary: RecipeSummary
    seeds: tuple[int, ...]
    fleet: str
    workers: int
    resources: SweepResources
    resumed: bool


@dataclass(frozen=True)
class SweepResult:
    """How a job ended."""

    folder: Path
    summary: SweepSummary
    outcomes: Mapping[int, SeedOutcome]
    #: False where all seeds were finished already.
    has_trained: bool
    #: The picture, where one could be drawn.
    plot: Path | None
    #: That this process took, without drawing it.
    elapsed_s: float = 0.0

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


class SweepView(Protocol):
    """Whoever shows a job. It is told after the board has been."""

    def show_note(self, text: str) -> None: ...

    def open(self, start: SweepStart, progress: SweepProgress) -> AbstractContextManager[None]: ...

    def show_event(self, seed: int, event: Mapping[str, Any]) -> None: ...

    def show_outcome(self, seed: int, outcome: SeedOutcome) -> None: ...


class SweepDisplay(SweepView, Protocol):
    """Shows a job, and how it ended."""

    def show_result(self, result: SweepResult) -> None: ...


class NullSweepView:
    """Shows nothing."""

    def show_note(self, text: str) -> None: ...

    def open(self, start: SweepStart, progress: SweepProgress) -> AbstractContextManager[None]:
        del start, progress
        return nullcontext()

    def show_event(self, seed: int, event: Mapping[str, Any]) -> None: ...

    def show_outcome(self, seed: int, outcome: SeedOutcome) -> None: ...
