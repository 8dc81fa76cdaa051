"""Prints a run as JSON lines, or a sweep as one JSON document."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rlflame import __version__
from rlflame.console.base import RunResult, RunStart, SweepResult
from rlflame.console.display import Display
from rlflame.console.output import as_json_text, print_note, print_report


class JsonDisplay(Display):
    """A display for programs; docs/reference/json.md lists its stable events."""

    def __init__(
        self,
        write: Callable[[str], None] = print_report,
        clock: Callable[[], float] = time.monotonic,
        *,
        sweep: bool = False,
    ) -> None:
        super().__init__(clock)
        self._write = write
        self._sweep = sweep

    def show_start(self, start: RunStart) -> None:
        fields = {
            "version": __version__,
            "folder": str(start.folder),
            "resumed": start.is_resume,
            "steps": self.progress.steps,
            "fleet": start.fleet,
            "workers": start.workers,
        }
        self.show_event({"event": "start", **fields, **start.summary.as_dict()})

    def show_event(self, event: Mapping[str, Any], seed: int | None = None) -> None:
        if self._sweep:
            super().show_event(event, seed)
        else:
            self._write(as_json_text(event))

    def show_note(self, text: str) -> None:
        if self._sweep:
            print_note(text)
        else:
            self.show_event({"event": "note", "text": text})

    def show_result(self, result: RunResult | SweepResult) -> None:
        progress = self.progress
        elapsed_s = max(progress.elapsed_s, 1e-9)
        seconds, speed = round(elapsed_s, 3), round(progress.steps_since_start / elapsed_s, 1)
        if isinstance(result, SweepResult):
            document = {
                "version": __version__,
                "folder": str(result.folder),
                "began": result.has_trained,
                "seconds": seconds if result.has_trained else None,
                "steps_per_s": speed if result.has_trained else None,
                "plot": result.plot and str(result.plot),
                **result.summary.as_dict(),
            }
            self._write(as_json_text(document, indent=2))
            return
        end = {
            "event": "end",
            "folder": str(result.folder),
            "complete": result.complete,
            "began": result.has_trained,
            "steps": result.progress.steps,
            "iterations": result.progress.iteration,
            "episodes": result.progress.episodes,
            "seconds": seconds,
            "steps_per_s": speed,
            "episodes_per_s": round(progress.episodes_since_start / elapsed_s, 2),
            "final_mean_reward": progress.final_return,
            "state_digest": result.state_digest,
            "digest": result.digest,
            "evaluation": result.evaluation and result.evaluation.as_dict(),
            "best": result.best and result.best.as_dict(),
        }
        self.show_event(end)
