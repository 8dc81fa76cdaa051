"""A run shown by its folder alone, and the one line of commands that train nothing.

Must not know: what runs, where numbers come from.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from rlflame.console.output import is_interactive, overwrite_line, print_note, print_report
from rlflame.console.run_progress import RunProgress
from rlflame.terminal_text import escape_line, format_count

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.console.base import RunResult, RunStart
    from rlflame.fleet.base import FleetEvent
    from rlflame.training.evaluation import EvaluationRecord
    from rlflame.training.trainer import Progress


class QuietDisplay:
    """The run folder at the end, for scripts."""

    def show_iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None: ...

    def show_evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None: ...

    def show_checkpoint(self, path: Path, progress: Progress) -> None: ...

    def show_fleet_event(self, event: FleetEvent) -> None: ...

    def show_note(self, text: str) -> None: ...

    @contextlib.contextmanager
    def open(self, run: RunStart) -> Iterator[None]:
        del run
        yield

    def show_result(self, result: RunResult) -> None:
        print_report(escape_line(str(result.folder)))


class StatusLine(QuietDisplay):
    """How many groups of an evaluation have been played, on one line that goes away again.

    Only where standard error is a terminal: it is no part of the result.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        stream = stream or sys.stderr
        self._stream = stream if is_interactive(stream) else None
        self._progress = RunProgress()

    def show_fleet_event(self, event: FleetEvent) -> None:
        self._progress.add_fleet_event(event)
        if event.kind == "note":
            self.show_note(event.text)
        if self._progress.phase:
            self._draw(self._progress.phase)
            return
        task_counts = self._progress.task_counts
        self._draw(
            f"{task_counts.finished} of {format_count(task_counts.submitted, 'group')} of "
            "episodes played"
        )

    def show_rendering(self, num_done: int, total: int) -> None:
        self._draw(
            f"{num_done} of {format_count(total, 'episode')} drawn" if total > 1 else "drawing"
        )

    def show_status(self, text: str) -> None:
        """What is going on now, for commands that play no episodes."""
        self._draw(text)

    def show_note(self, text: str) -> None:
        self._draw("")
        print_note(text)

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._draw("")

    def _draw(self, text: str) -> None:
        if self._stream is not None:
            overwrite_line(self._stream, text)
