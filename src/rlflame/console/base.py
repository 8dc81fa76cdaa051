"""What a run tells whoever shows it. Must not know: how it is shown, how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlflame.fleet.base import FleetEvent
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.run_recorder import RunObserver
from rlflame.training.evaluation import EvaluationRecord
from rlflame.training.trainer import Progress


class RunView(RunObserver, Protocol):
    """Whoever shows a run; `NullView` is the one that does not."""

    def show_fleet_event(self, event: FleetEvent) -> None: ...

    def show_note(self, text: str) -> None: ...

    def open(self, run: RunStart) -> AbstractContextManager[None]:
        """Open for as long as the run goes on."""


@dataclass(frozen=True)
class RunStart:
    """What is about to run."""

    folder: Path
    checkpoint: Checkpoint
    fleet: str
    workers: int
    preset: str
    resumed: bool
    #: `--fleet auto` looked for a cluster and found none configured.
    no_cluster: bool = False
    #: Names and capacities of the fleets that take turns until one of them is chosen.
    candidates: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    folder: Path
    progress: Progress
    complete: bool
    #: False where a resumed run was finished already, and nothing had to be done.
    has_trained: bool
    state_digest: str
    digest: str
    evaluation: EvaluationRecord | None
    best: EvaluationRecord | None
    #: The command that goes on from here.
    resume_command: str
    #: The command that scores its best policy.
    evaluation_command: str


class RunDisplay(RunView, Protocol):
    """Shows a run, and how it ended."""

    def show_result(self, result: RunResult) -> None: ...


class NullView:
    """Shows nothing."""

    def show_iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None: ...

    def show_evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None: ...

    def show_checkpoint(self, path: Path, progress: Progress) -> None: ...

    def show_fleet_event(self, event: FleetEvent) -> None: ...

    def show_note(self, text: str) -> None: ...

    def open(self, run: RunStart) -> AbstractContextManager[None]:
        del run
        return nullcontext()
