"""The live view of a job on a terminal: a line a seed, and one of all. Must not know: what runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlflame import __version__
from rlflame.console.live import KeyValueTable
from rlflame.console.output import print_note, print_note_lines
from rlflame.console.rich_console import make_console
from rlflame.console.sweep_base import SweepResult, SweepStart
from rlflame.console.sweep_displays import (
    format_failure,
    format_result_lines,
    format_seeds_table,
    format_start_lines,
    format_status,
    format_totals,
    select_rows,
)
from rlflame.console.sweep_progress import SeedProgress, SweepProgress
from rlflame.storage.sweep_result import SeedOutcome
from rlflame.terminal_text import format_duration

_REFRESHES_PER_S = 4
#: Lines of the view that are not seeds.
_OTHER_LINES = 6
#: What is said of a seed, and how wide that is; the bar takes more where there is room.
_COLUMNS = {"seed": 4, "state": 8, "bar": 6, "steps": 9, "evaluation": 10, "steps/s": 7}
#: What goes first where there is no room for all.
_OPTIONAL_COLUMNS = ("bar", "steps/s", "steps", "evaluation")
_UNNAMED_COLUMNS = ("state", "bar")


class LiveSweepDisplay:
    """A banner, a view that moves while seeds run, and an end block."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or make_console()
        self._progress: SweepProgress | None = None

    def show_note(self, text: str) -> None:
        print_note(text)

    @contextlib.contextmanager
    def open(self, start: SweepStart, progress: SweepProgress) -> Iterator[None]:
        self._progress = progress
        self._console.print(Text(f"rlflame {__version__}", style="bold"))
        self._console.print(KeyValueTable(format_start_lines(start, progress)))
        live = Live(
            get_renderable=self.render_view,
            console=self._console,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )
        with live:
            # However a process ends, the terminal it leaves behind has a cursor.
            self._console.show_cursor(True)
            try:
                yield
            except BaseException:
                live.transient = False
                raise

    def show_event(self, seed: int, event: Mapping[str, Any]) -> None: ...

    def show_outcome(self, seed: int, outcome: SeedOutcome) -> None:
        if outcome.error is not None:
            print_note_lines(format_failure(seed, outcome))

    def show_result(self, result: SweepResult) -> None:
        self._console.print(Text(format_status(result), style="bold"))
        for line in format_seeds_table(result.summary):
            self._console.print(Text(line))
        self._console.print(KeyValueTable(format_result_lines(result, self._progress)), crop=False)

    def render_view(self) -> RenderableType:
        """The job now."""
        progress = self._progress
        assert progress is not None
        columns = _select_columns(self._console.size.width)
        grid = Table.grid(padding=(0, 2))
        for name in columns:
            justify: JustifyMethod = "left" if name in _UNNAMED_COLUMNS else "right"
            grid.add_column(justify=justify, style="bold" if name == "seed" else "")
        max_rows = self._console.size.height - _OTHER_LINES
        visible_rows, num_hidden = select_rows(list(progress.rows.values()), max_rows)
        grid.add_row(*("" if name in _UNNAMED_COLUMNS else name for name in columns), style="dim")
        for row in visible_rows:
            cells = _make_cells(row)
            grid.add_row(*(cells[name] for name in columns))
        parts: list[RenderableType] = [Text(), grid]
        if num_hidden:
            parts.append(Text(f"  and {num_hidden} more", style="dim"))
        if progress.phase:
            parts.append(Text(f"  {progress.phase}", style="dim"))
        parts.append(
            Text(f"  {progress.fraction_done:4.0%}  {format_totals(progress)}", style="bold")
        )
        parts.append(Text(f"        {_format_times(progress)}", style="dim"))
        return Group(*parts)


def _select_columns(width: int) -> list[str]:
    """The columns that a terminal has room for: half a number is worse than none."""
    columns = [*_COLUMNS]
    for name in _OPTIONAL_COLUMNS:
        if sum(_COLUMNS[column] + 2 for column in columns) - 2 <= width:
            break
        columns.remove(name)
    return columns


def _make_cells(row: SeedProgress) -> dict[str, RenderableType]:
    return {
        "seed": f"  {row.seed}",
        "state": row.state,
        "bar": ProgressBar(total=1.0, completed=row.fraction_done, width=20),
        "steps": f"{row.steps:,}",
        "evaluation": "-" if row.evaluation is None else f"{row.evaluation:,.1f}",
        "steps/s": f"{row.steps_per_s:,.0f}" if row.state == "running" else "",
    }


def _format_times(progress: SweepProgress) -> str:
    remaining_s = progress.remaining_s
    elapsed_text = f"{format_duration(progress.elapsed_s)} gone"
    return (
        elapsed_text
        if remaining_s is None
        else f"{elapsed_text}, {format_duration(remaining_s)} left"
    )
