"""A run as JSON lines, for programs. Must not know: what runs, where numbers come from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlflame import __version__
from rlflame.console.output import as_json_text, report
from rlflame.console.progress import Board

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.console.base import RunResult, RunStart
    from rlflame.fleet.base import FleetEvent
    from rlflame.training.evaluation import EvaluationRecord
    from rlflame.training.trainer import Progress


class JsonDisplay:
    """One JSON object a line. Events and names are stable; a reader skips what it does not know.

    start       what runs: environment, sizes, algorithm, budget, slots, workers, folder
    iteration   the metrics of metrics.jsonl, after each iteration
    evaluation  steps, whether it is the best so far, the record as `eval --json` prints it
    checkpoint  path and steps, after each save
    retried     slot, purpose and reason, when a lost worker's task is given to another
    speculated  slot and purpose, when a slow task is given to a second worker as well
    phase       what the fleet does before tasks run; an empty text when it is over
    note        a sentence
    end         complete or not, time, speed, digests, the final and the best evaluation
    error       message, hint, exit code; the last line where there is one, else `end` is
    """

    def __init__(
        self,
        out: Callable[[str], None] = report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._board = Board(clock)

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        self._board.learned(metrics, returns)
        self._event("iteration", **metrics)

    def evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        self._event("evaluation", steps=steps, best=best, **record.as_dict())

    def saved(self, path: Path, progress: Progress) -> None:
        self._event("checkpoint", path=str(path), steps=progress.steps)

    def fleet(self, event: FleetEvent) -> None:
        if event.kind == "retried":
            self._event("retried", slot=event.slot, purpose=event.purpose, reason=event.text)
        elif event.kind == "speculated":
            self._event("speculated", slot=event.slot, purpose=event.purpose)
        elif event.kind == "phase":
            self._event("phase", text=event.text)
        elif event.kind == "note":
            self.note(event.text)

    def note(self, text: str) -> None:
        self._event("note", text=text)

    @contextlib.contextmanager
    def begin(self, run: RunStart) -> Iterator[None]:
        board = self._board
        board.begin(run)
        assert board.facts is not None
        self._event(
            "start",
            version=__version__,
            folder=str(run.folder),
            resumed=run.resumed,
            steps=board.steps,
            fleet=run.fleet,
            workers=run.workers,
            **board.facts.as_dict(),
        )
        yield

    def ended(self, result: RunResult) -> None:
        board = self._board
        seconds = max(board.elapsed_s, 1e-9)
        self._event(
            "end",
            folder=str(result.folder),
            complete=result.complete,
            began=result.began,
            steps=result.progress.steps,
            iterations=result.progress.iteration,
            episodes=result.progress.episodes,
            seconds=round(seconds, 3),
            steps_per_s=round(board.own_steps / seconds, 1),
            episodes_per_s=round(board.own_episodes / seconds, 2),
            final_mean_reward=board.final_return,
            state_digest=result.state_digest,
            digest=result.digest,
            evaluation=result.evaluation and result.evaluation.as_dict(),
            best=result.best and result.best.as_dict(),
        )

    def _event(self, name: str, **values: Any) -> None:
        self._out(as_json_text({"event": name, **values}))
