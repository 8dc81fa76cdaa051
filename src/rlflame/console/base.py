"""What a run tells whoever shows it. Must not know: how it is shown, how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlflame.fleet.base import FleetEvent
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.run_recorder import Watcher
from rlflame.training.evaluation import EvaluationRecord
from rlflame.training.trainer import Progress


class Show(Watcher, Protocol):
    """Whoever shows a run; `Silent` is the one that does not."""

    def fleet(self, event: FleetEvent) -> None: ...

    def note(self, text: str) -> None: ...

    def begin(self, run: RunStart) -> AbstractContextManager[None]:
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
    began: bool
    state_digest: str
    digest: str
    evaluation: EvaluationRecord | None
    best: EvaluationRecord | None
    #: The command that goes on from here.
    onward: str
    #: The command that scores its best policy.
    scoring: str


class Display(Show, Protocol):
    """Shows a run, and how it ended."""

    def ended(self, result: RunResult) -> None: ...


class Silent:
    """Shows nothing."""

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None: ...

    def evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None: ...

    def saved(self, path: Path, progress: Progress) -> None: ...

    def fleet(self, event: FleetEvent) -> None: ...

    def note(self, text: str) -> None: ...

    def begin(self, run: RunStart) -> AbstractContextManager[None]:
        del run
        return nullcontext()
