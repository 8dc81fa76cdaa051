"""A run shown by its folder alone, and the one line of commands that train nothing."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

from rlflame.console.base import NullView
from rlflame.console.display import Display
from rlflame.console.output import is_interactive, overwrite_line, print_note, print_report
from rlflame.console.run_progress import FleetProgress
from rlflame.terminal_text import escape_line, format_count

if TYPE_CHECKING:
    from rlflame.console.base import RunResult, SweepResult
    from rlflame.fleet.base import FleetEvent


class QuietDisplay(Display):
    """The folder at the end, for scripts, and on standard error the seeds that failed."""

    def show_note(self, text: str) -> None: ...

    def show_result(self, result: RunResult | SweepResult) -> None:
        print_report(escape_line(str(result.folder)))


class StatusLine(NullView):
    """What a command does now, on one line that goes away again.

    Only where standard error is a terminal: it is no part of the result.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        stream = stream or sys.stderr
        self._stream = stream if is_interactive(stream) else None
        self._fleet = FleetProgress()

    def show_fleet_event(self, event: FleetEvent) -> None:
        self._fleet.add_event(event)
        if event.kind == "note":
            self.show_note(event.text)
        groups = format_count(self._fleet.count_tasks(), "group")
        played = f"{self._fleet.count_tasks('done')} of {groups} of episodes played"
        self.show_status(self._fleet.phase or played)

    def show_rendering(self, num_done: int, total: int) -> None:
        episodes = format_count(total, "episode")
        self.show_status(f"{num_done} of {episodes} drawn" if total > 1 else "drawing")

    def show_status(self, text: str) -> None:
        if self._stream is not None:
            overwrite_line(self._stream, text)

    def show_note(self, text: str) -> None:
        self.show_status("")
        print_note(text)

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.show_status("")
