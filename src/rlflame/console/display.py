"""The base class of displays, two small displays, and the choice of a display.

A run in this process produces the same events as the process of a seed, so that a display handles
both in the same way.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from rlflame.console.base import NullView, RunView
from rlflame.console.output import (
    format_pairs,
    is_interactive,
    overwrite_line,
    print_note,
    print_note_lines,
    print_report,
    wrap_text,
)
from rlflame.console.run_progress import FleetProgress, RunProgress
from rlflame.console.run_text import (
    Pairs,
    format_failure,
    format_headline,
    format_note,
    format_result_lines,
    format_seeds_table,
    format_start_lines,
    format_status,
)
from rlflame.terminal_text import escape_line, format_count

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.console.base import RunResult, RunStart, SweepResult
    from rlflame.fleet.base import FleetEvent
    from rlflame.storage.sweep_folder import SeedOutcome
    from rlflame.training.evaluation import EvaluationRecord
    from rlflame.training.trainer import Progress


class Display(RunView):
    """The base class of displays; each shows events and blocks in its own way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress = RunProgress(clock)
        self._seed_notes: set[str] = set()

    @contextlib.contextmanager
    def open(self, start: RunStart) -> Iterator[None]:
        self.progress.start(start)
        self.show_start(start)
        try:
            yield
        finally:
            self.progress.stop()

    def show_start(self, start: RunStart) -> None:
        self.show_block(format_headline(start), [], format_start_lines(start, self.progress))

    def show_result(self, result: RunResult | SweepResult) -> None:
        lines = format_result_lines(result, self.progress)
        self.show_block(format_status(result), format_seeds_table(result), lines)

    def show_block(self, title: str, table: list[str], pairs: Pairs) -> None:
        """Show a title, the lines of a table, and pairs of a name and a text."""
        lines = [*table, *([""] if table else []), *format_pairs(pairs)]
        print_report("\n".join([wrap_text(title), *lines]))

    def show_event(self, event: Mapping[str, Any], seed: int | None = None) -> None:
        """Show an event that `progress` already includes; `seed` is None outside a sweep."""
        if seed is not None and event["event"] == "note":
            if event["text"] in self._seed_notes:  # another seed has the same note
                return
            self._seed_notes.add(event["text"])
        if note := format_note(event, seed):
            self.show_note(note)

    def show_note(self, text: str) -> None:
        print_note(text)

    def show_iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        self.progress.add_returns(returns)
        self._add_event({"event": "iteration", **metrics})

    def show_evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        self._add_event({"event": "evaluation", "steps": steps, "best": best, **record.as_dict()})

    def show_checkpoint(self, path: Path, progress: Progress) -> None:
        self._add_event({"event": "checkpoint", "path": str(path), "steps": progress.steps})

    def _add_event(self, event: Mapping[str, Any], seed: int | None = None) -> None:
        self.progress.add_event(event, seed)
        self.show_event(event, seed)

    def show_fleet_event(self, event: FleetEvent) -> None:
        self.progress.fleet.add_event(event)
        if event.kind in ("retried", "speculated"):
            reason = {"reason": event.text} if event.kind == "retried" else {}
            task = {"slot": event.slot, "purpose": event.purpose}
            self.show_event({"event": event.kind, **task, **reason})
        elif event.kind in ("phase", "note"):
            self.show_event({"event": event.kind, "text": event.text})

    def show_seed_start(self, seed: int) -> None:
        self.progress.rows[seed].state = "running"

    def show_seed_event(self, seed: int, event: Mapping[str, Any]) -> None:
        self._add_event(event, seed)

    def show_seed_end(self, seed: int, outcome: SeedOutcome) -> None:
        self.progress.rows[seed].state = outcome.end
        if outcome.error is not None:
            print_note_lines(format_failure(seed, outcome.error))


class QuietDisplay(Display):
    """Prints only the run folder, for scripts; failed seeds go to standard error."""

    def show_note(self, text: str) -> None: ...

    def show_block(self, title: str, table: list[str], pairs: Pairs) -> None: ...

    def show_result(self, result: RunResult | SweepResult) -> None:
        print_report(escape_line(str(result.folder)))


class StatusLine(NullView):
    """Shows the activity of a command on one line, which disappears at the end.

    If standard error is not a terminal, a line is printed at most every 10 seconds instead.
    """

    _INTERVAL_S = 10.0

    def __init__(
        self, stream: IO[str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._interactive = is_interactive(self._stream)
        self._clock, self._last_print = clock, clock()
        self._fleet = FleetProgress()

    def show_fleet_event(self, event: FleetEvent) -> None:
        self._fleet.add_event(event)
        if event.kind == "note":
            self.show_note(event.text)
        groups = format_count(self._fleet.count_tasks(), "group")
        progress_text = f"{self._fleet.count_tasks('done')} of {groups} of episodes played"
        self.show_status(self._fleet.phase or progress_text)

    def show_status(self, text: str) -> None:
        if self._interactive:
            overwrite_line(self._stream, text)
        elif text and self._clock() - self._last_print >= self._INTERVAL_S:
            self._last_print = self._clock()
            print_note(text)

    def show_note(self, text: str) -> None:
        self.show_status("")
        print_note(text)

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.show_status("")


def make_display(mode: str, *, sweep: bool = False) -> RunView:
    """Make the display for a mode.

    `auto` chooses the live display on terminals that can move the cursor, and the plain one
    otherwise. Each display is imported only when it is chosen.
    """
    if mode == "json":
        from rlflame.console.json_lines import JsonDisplay

        return JsonDisplay(sweep=sweep)
    if mode == "quiet":
        return QuietDisplay()
    if mode == "live" or (mode == "auto" and is_interactive(sys.stdout)):
        from rlflame.console.live import LiveDisplay

        return LiveDisplay()
    from rlflame.console.plain import PlainDisplay

    return PlainDisplay()
