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
from rlflame.console.live import Pairs
from rlflame.console.output import say_aside, say_lines_aside
from rlflame.console.rich_console import make_console
from rlflame.console.sweep_base import JobResult, JobStart
from rlflame.console.sweep_progress import Row, SeedsBoard
from rlflame.console.sweep_text import (
    banner,
    closing,
    ending,
    failed,
    rows_shown,
    seeds_table,
    together,
)
from rlflame.storage.sweep_result import Outcome
from rlflame.text import format_duration

_REFRESHES_PER_S = 4
#: Lines of the view that are not seeds.
_OTHER_LINES = 6
#: What is said of a seed, and how wide that is; the bar takes more where there is room.
_COLUMNS = {"seed": 4, "state": 8, "bar": 6, "steps": 9, "evaluation": 10, "steps/s": 7}
#: What goes first where there is no room for all.
_DISPENSABLE = ("bar", "steps/s", "steps", "evaluation")
_UNNAMED = ("state", "bar")


class LiveSeeds:
    """A banner, a view that moves while seeds run, and an end block."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or make_console()
        self._board: SeedsBoard | None = None

    def note(self, text: str) -> None:
        say_aside(text)

    @contextlib.contextmanager
    def begin(self, start: JobStart, board: SeedsBoard) -> Iterator[None]:
        self._board = board
        self._console.print(Text(f"rlflame {__version__}", style="bold"))
        self._console.print(Pairs(banner(start, board)))
        live = Live(
            get_renderable=self.view,
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

    def event(self, seed: int, event: Mapping[str, Any]) -> None: ...

    def ended(self, seed: int, outcome: Outcome) -> None:
        if outcome.error is not None:
            say_lines_aside(failed(seed, outcome))

    def finished(self, result: JobResult) -> None:
        self._console.print(Text(ending(result), style="bold"))
        for line in seeds_table(result.summary):
            self._console.print(Text(line))
        self._console.print(Pairs(closing(result, self._board)), crop=False)

    def view(self) -> RenderableType:
        """The job now."""
        board = self._board
        assert board is not None
        columns = _fitting(self._console.size.width)
        grid = Table.grid(padding=(0, 2))
        for name in columns:
            justify: JustifyMethod = "left" if name in _UNNAMED else "right"
            grid.add_column(justify=justify, style="bold" if name == "seed" else "")
        room = self._console.size.height - _OTHER_LINES
        shown, more = rows_shown(list(board.rows.values()), room)
        grid.add_row(*("" if name in _UNNAMED else name for name in columns), style="dim")
        for row in shown:
            cells = _cells(row)
            grid.add_row(*(cells[name] for name in columns))
        parts: list[RenderableType] = [Text(), grid]
        if more:
            parts.append(Text(f"  and {more} more", style="dim"))
        if board.phase:
            parts.append(Text(f"  {board.phase}", style="dim"))
        parts.append(Text(f"  {board.share:4.0%}  {together(board)}", style="bold"))
        parts.append(Text(f"        {_times(board)}", style="dim"))
        return Group(*parts)


def _fitting(width: int) -> list[str]:
    """The columns that a terminal has room for: half a number is worse than none."""
    columns = [*_COLUMNS]
    for name in _DISPENSABLE:
        if sum(_COLUMNS[kept] + 2 for kept in columns) - 2 <= width:
            break
        columns.remove(name)
    return columns


def _cells(row: Row) -> dict[str, RenderableType]:
    return {
        "seed": f"  {row.seed}",
        "state": row.state,
        "bar": ProgressBar(total=1.0, completed=row.share, width=20),
        "steps": f"{row.steps:,}",
        "evaluation": "-" if row.evaluation is None else f"{row.evaluation:,.1f}",
        "steps/s": f"{row.steps_per_s:,.0f}" if row.state == "running" else "",
    }


def _times(board: SeedsBoard) -> str:
    left = board.remaining_s
    gone = f"{format_duration(board.elapsed_s)} gone"
    return gone if left is None else f"{gone}, {format_duration(left)} left"
