"""A run as JSON lines, for programs. Must not know: what runs, where numbers come from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlflame import __version__
from rlflame.console.output import as_json_text, print_report
from rlflame.console.run_progress import RunProgress

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
        write: Callable[[str], None] = print_report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._progress = RunProgress(clock)

    def show_iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        self._progress.add_iteration(metrics, returns)
        self._write_event("iteration", **metrics)

    def show_evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        self._write_event("evaluation", steps=steps, best=best, **record.as_dict())

    def show_checkpoint(self, path: Path, progress: Progress) -> None:
        self._write_event("checkpoint", path=str(path), steps=progress.steps)

    def show_fleet_event(self, event: FleetEvent) -> None:
        if event.kind == "retried":
            self._write_event("retried", slot=event.slot, purpose=event.purpose, reason=event.text)
        elif event.kind == "speculated":
            self._write_event("speculated", slot=event.slot, purpose=event.purpose)
        elif event.kind == "phase":
            self._write_event("phase", text=event.text)
        elif event.kind == "note":
            self.show_note(event.text)

    def show_note(self, text: str) -> None:
        self._write_event("note", text=text)

    @contextlib.contextmanager
    def open(self, run: RunStart) -> Iterator[None]:
        progress = self._progress
        progress.start(run)
        assert progress.recipe_summary is not None
        self._write_event(
            "start",
            version=__version__,
            folder=str(run.folder),
            resumed=run.resumed,
            steps=progress.steps,
            fleet=run.fleet,
            workers=run.workers,
            **progress.recipe_summary.as_dict(),
        )
        yield

    def show_result(self, result: RunResult) -> None:
        progress = self._progress
        elapsed_s = max(progress.elapsed_s, 1e-9)
        self._write_event(
            "end",
            folder=str(result.folder),
            complete=result.complete,
            began=result.has_trained,
            steps=result.progress.steps,
            iterations=result.progress.iteration,
            episodes=result.progress.episodes,
            seconds=round(elapsed_s, 3),
            steps_per_s=round(progress.steps_since_start / elapsed_s, 1),
            episodes_per_s=round(progress.episodes_since_start / elapsed_s, 2),
            final_mean_reward=progress.final_return,
            state_digest=result.state_digest,
            digest=result.digest,
            evaluation=result.evaluation and result.evaluation.as_dict(),
            best=result.best and result.best.as_dict(),
        )

    def _write_event(self, name: str, **values: Any) -> None:
        self._write(as_json_text({"event": name, **values}))
