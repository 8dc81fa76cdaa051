"""The live view of a run on a terminal. Must not know: what runs, where numbers come from."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlflame.console.formatting import is_command
from rlflame.console.output import say_aside
from rlflame.console.progress import Board, Evaluated
from rlflame.console.rich_console import make_console
from rlflame.console.run_text import again, banner, closing, ending, headline
from rlflame.text import escape_line, format_count, format_duration

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.console.base import RunResult, RunStart
    from rlflame.fleet.base import FleetEvent
    from rlflame.training.evaluation import EvaluationRecord
    from rlflame.training.trainer import Progress

_REFRESHES_PER_S = 4
#: Below so many columns there is no bar, and text stands below its word.
_NARROW, _WITH_TIME_GONE = 40, 60


class LiveDisplay:
    """A banner, a view that moves while the run goes on, and an end block."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or make_console()
        self.board = Board(clock)
        self._saved = ""

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        self.board.learned(metrics, returns)

    def evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        self.board.evaluated = Evaluated(steps, record, best)

    def saved(self, path: Path, progress: Progress) -> None:
        self._saved = f"step {progress.steps:,}"

    def fleet(self, event: FleetEvent) -> None:
        self.board.fleet(event)
        if event.kind == "retried" and event.text:
            self.note(again(event))
        elif event.kind == "note":
            self.note(event.text)

    def note(self, text: str) -> None:
        say_aside(text)

    @contextlib.contextmanager
    def begin(self, run: RunStart) -> Iterator[None]:
        self.board.begin(run)
        self._console.print(Text(headline(run), style="bold"))
        self._console.print(Pairs(banner(run, self.board)))
        live = Live(
            get_renderable=self.view,
            console=self._console,
            refresh_per_second=_REFRESHES_PER_S,
            # The end block takes the view's place; after a failure the last view stays.
            transient=True,
            redirect_stdout=False,
            # Notes appear above the view, unless they go somewhere else anyway.
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

    def ended(self, result: RunResult) -> None:
        self._console.print(Text(ending(result), style="bold"))
        self._console.print(Pairs(closing(result, self.board)), crop=False)

    def view(self) -> RenderableType:
        """The run now."""
        board = self.board
        return Group(Text(), self._bar(), Pairs(self._lines(board)))

    def _bar(self) -> RenderableType:
        board, columns = self.board, self._console.width
        left = board.remaining_s
        cells: list[RenderableType] = [Text(f"  {board.share:4.0%}", style="bold")]
        if columns >= _NARROW:
            cells.append(ProgressBar(total=1.0, completed=board.share, width=min(28, columns - 30)))
        if columns >= _WITH_TIME_GONE:
            cells.append(Text(f"{format_duration(board.elapsed_s)} gone"))
        cells.append(Text(f"{format_duration(left)} left" if left is not None else ""))
        grid = Table.grid(padding=(0, 2), expand=False)
        grid.add_row(*cells)
        return grid

    def _lines(self, board: Board) -> list[tuple[str, str]]:
        mean, fanout = board.recent_return, board.fanout
        lines = [
            (
                "progress",
                f"step {board.steps:,}, iteration {board.iteration:,}, "
                f"episode {board.episodes:,}, {board.steps_per_s:,.0f} steps/s",
            ),
            (
                "evaluating" if board.evaluating else "rollouts",
                f"{fanout.submitted} submitted, {fanout.running} running, "
                f"{fanout.finished} done, {fanout.retried} retried"
                + (f" ({board.retried_in_all} in all)" if board.retried_in_all else "")
                + (f", {fanout.speculated} speculated" if fanout.speculated else ""),
            ),
            ("return", f"{mean:,.2f} (last 100 episodes)" if mean is not None else "-"),
        ]
        if board.phase or board.workers:
            workers = f"{format_count(board.workers, 'executor')} at work" if board.workers else ""
            lines.insert(1, ("cluster", board.phase or workers))
        if board.metrics:
            lines.append(("learning", learning(board.metrics)))
        evaluated = board.evaluated
        if evaluated is not None:
            record = evaluated.record
            lines.append(
                (
                    "evaluation",
                    f"{record.mean:,.1f} [{record.low:,.1f}, {record.high:,.1f}] at step "
                    f"{evaluated.steps:,}{', the best so far' if evaluated.best else ''}",
                )
            )
        if self._saved:
            lines.append(("saved", self._saved))
        return lines


def learning(metrics: Mapping[str, Any]) -> str:
    """What tells at a glance whether learning is sound."""
    wanted = (
        ("loss", "loss", ".3g"),
        ("approx_kl", "kl", ".4f"),
        ("clip_fraction", "clipped", ".0%"),
        ("explained_variance", "explained variance", ".2f"),
        ("actor_loss", "actor", ".3g"),
        ("critic_loss", "critic", ".3g"),
        ("ent_coef", "entropy coefficient", ".3g"),
    )
    known = ((word, metrics.get(name), form) for name, word, form in wanted)
    return ", ".join(f"{word} {value:{form}}" for word, value, form in known if value is not None)


@dataclass(frozen=True)
class Pairs:
    """Words and what there is to say of them: beside them, or below where there is no room.

    A command stays in one line, so that it can be copied; print them uncropped.
    """

    lines: Sequence[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Escaped before the layout, which measures text.
        lines = [(escape_line(word), escape_line(text)) for word, text in self.lines]
        if options.max_width < _NARROW:
            for word, text in lines:
                yield Text(f"  {word}", style="dim")
                if is_command(text):
                    yield _whole(Text(f"    {text}"))
                else:
                    yield Padding(Text(text, overflow="fold"), (0, 0, 0, 4))
            return
        width = max(13, *(len(word) + 2 for word, _ in lines))
        for word, text in lines:
            if is_command(text):
                yield _whole(Text.assemble((f"{'  ' + word:{width}}", "dim"), f"  {text}"))
                continue
            grid = Table.grid(padding=(0, 2))
            grid.add_column(no_wrap=True, style="dim", width=width)
            grid.add_column(overflow="fold")
            grid.add_row(Text(f"  {word}"), Text(text))  # a str would be read as markup
            yield grid


def _whole(line: Text) -> Text:
    """In one line, which a terminal may break, but not whoever copies it."""
    line.no_wrap, line.overflow = True, "ignore"
    return line
