"""What a job of seeds tells whoever shows it. Must not know: how it is shown, how it is run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlflame.console.recipe_summary import Facts
from rlflame.console.sweep_progress import SeedsBoard
from rlflame.errors import RlflameError
from rlflame.storage.sweep_result import Outcome, Summary


@dataclass(frozen=True, slots=True)
class Shares:
    """`workers` are each seed's own; 0 where it steps its environments in its own process."""

    at_once: int
    workers: int
    #: Whether memory, not processors, decides how many there are at once.
    memory_bound: bool = False


@dataclass(frozen=True)
class JobStart:
    """What is about to run."""

    folder: Path
    facts: Facts
    seeds: tuple[int, ...]
    fleet: str
    workers: int
    shares: Shares
    resumed: bool


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    folder: Path
    summary: Summary
    outcomes: Mapping[int, Outcome]
    #: False where all seeds were finished already.
    began: bool
    #: The picture, where one could be drawn.
    plot: Path | None
    #: That this process took, without drawing it.
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        return self.summary.complete

    @property
    def failures(self) -> dict[int, RlflameError]:
        return {seed: one.error for seed, one in self.outcomes.items() if one.error is not None}


class SeedsShow(Protocol):
    """Whoever shows a job. It is told after the board has been."""

    def note(self, text: str) -> None: ...

    def begin(self, start: JobStart, board: SeedsBoard) -> AbstractContextManager[None]: ...

    def event(self, seed: int, event: Mapping[str, Any]) -> None: ...

    def ended(self, seed: int, outcome: Outcome) -> None: ...


class SeedsDisplay(SeedsShow, Protocol):
    """Shows a job, and how it ended."""

    def finished(self, result: JobResult) -> None: ...


class SilentSeeds:
    """Shows nothing."""

    def note(self, text: str) -> None: ...

    def begin(self, start: JobStart, board: SeedsBoard) -> AbstractContextManager[None]:
        del start, board
        return nullcontext()

    def event(self, seed: int, event: Mapping[str, Any]) -> None: ...

    def ended(self, seed: int, outcome: Outcome) -> None: ...
