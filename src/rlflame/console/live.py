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
from rlflame.console.output import print_note
from rlflame.console.rich_console import make_console
from rlflame.console.run_progress import LatestEvaluation, RunProgress
from rlflame.console.run_text import (
    format_headline,
    format_result_lines,
    format_retry,
    format_start_lines,
    format_status,
)
from rlflame.terminal_text import escape_line, format_count, format_duration

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.console.base import RunResult, RunStart
    from rlflame.fleet.base import FleetEvent
    from rlflame.training.evaluation import EvaluationRecord
    from rlflame.training.trainer import Progress

_REFRESHES_PER_S = 4
#: Below so many columns there is no bar, and text stands below its word.
_NARROW_COLUMNS, _ELAPSED_TIME_COLUMNS = 40, 60


class LiveDisplay:
    """A banner, a view that moves while the run goes on, and an end block."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or make_console()
        self.progress = RunProgress(clock)
        self._checkpoint_text = ""

    def show_iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        self.progress.add_iteration(metrics, returns)

    def show_evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        self.progress.latest_evaluation = LatestEvaluation(steps, record, best)

    def show_checkpoint(self, path: Path, progress: Progress) -> None:
        self._checkpoint_text = f"step {progress.steps:,}"

    def show_fleet_event(self, event: FleetEvent) -> None:
        self.progress.add_fleet_event(event)
        if event.kind == "retried" and event.text:
            self.show_note(format_retry(event))
        elif event.kind == "note":
            self.show_note(event.text)

    def show_note(self, text: str) -> None:
        print_note(text)

    @contextlib.contextmanager
    def open(self, run: RunStart) -> Iterator[None]:
        self.progress.start(run)
        self._console.print(Text(format_headline(run), style="bold"))
        self._console.print(KeyValueTable(format_start_lines(run, self.progress)))
        live = Live(
            get_renderable=self.render_view,
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

    def show_result(self, result: RunResult) -> None:
        self._console.print(Text(format_status(result), style="bold"))
        self._console.print(KeyValueTable(format_result_lines(result, self.progress)), crop=False)

    def render_view(self) -> RenderableType:
        """The run now."""
        progress = self.progress
        return Group(Text(), self._make_bar(), KeyValueTable(self._format_lines(progress)))

    def _make_bar(self) -> RenderableType:
        progress, columns = self.progress, self._console.width
        remaining_s = progress.remaining_s
        cells: list[RenderableType] = [Text(f"  {progress.fraction_done:4.0%}", style="bold")]
        if columns >= _NARROW_COLUMNS:
            cells.append(
                ProgressBar(
                    total=1.0, completed=progress.fraction_done, width=min(28, columns - 30)
                )
            )
        if columns >= _ELAPSED_TIME_COLUMNS:
            cells.append(Text(f"{format_duration(progress.elapsed_s)} gone"))
        cells.append(
            Text(f"{format_duration(remaining_s)} left" if remaining_s is not None else "")
        )
        grid = Table.grid(padding=(0, 2), expand=False)
        grid.add_row(*cells)
        return grid

    def _format_lines(self, progress: RunProgress) -> list[tuple[str, str]]:
        mean, task_counts = progress.recent_return, progress.task_counts
        lines = [
            (
                "progress",
                f"step {progress.steps:,}, iteration {progress.iteration:,}, "
                f"episode {progress.episodes:,}, {progress.steps_per_s:,.0f} steps/s",
            ),
            (
                "evaluating" if progress.is_evaluating else "rollouts",
                f"{task_counts.submitted} submitted, {task_counts.running} running, "
                f"{task_counts.finished} done, {task_counts.retried} retried"
                + (f" ({progress.total_retried} in all)" if progress.total_retried else "")
                + (f", {task_counts.speculated} speculated" if task_counts.speculated else ""),
            ),
            ("return", f"{mean:,.2f} (last 100 episodes)" if mean is not None else "-"),
        ]
        if progress.phase or progress.workers:
            workers = (
                f"{format_count(progress.workers, 'executor')} at work" if progress.workers else ""
            )
            lines.insert(1, ("cluster", progress.phase or workers))
        if progress.metrics:
            lines.append(("learning", format_learning(progress.metrics)))
        latest_evaluation = progress.latest_evaluation
        if latest_evaluation is not None:
            record = latest_evaluation.record
            lines.append(
                (
                    "evaluation",
                    f"{record.mean:,.1f} [{record.low:,.1f}, {record.high:,.1f}] at step "
                    f"{latest_evaluation.steps:,}"
                    f"{', the best so far' if latest_evaluation.best else ''}",
                )
            )
        if self._checkpoint_text:
            lines.append(("saved", self._checkpoint_text))
        return lines


def format_learning(metrics: Mapping[str, Any]) -> str:
    """What tells at a glance whether learning is sound."""
    metric_formats = (
        ("loss", "loss", ".3g"),
        ("approx_kl", "kl", ".4f"),
        ("clip_fraction", "clipped", ".0%"),
        ("explained_variance", "explained variance", ".2f"),
        ("actor_loss", "actor", ".3g"),
        ("critic_loss", "critic", ".3g"),
        ("ent_coef", "entropy coefficient", ".3g"),
    )
    values = ((word, metrics.get(name), form) for name, word, form in metric_formats)
    return ", ".join(f"{word} {value:{form}}" for word, value, form in values if value is not None)


@dataclass(frozen=True)
class KeyValueTable:
    """Words and what there is to say of them: beside them, or below where there is no room.

    A command stays in one line, so that it can be copied; print them uncropped.
    """

    lines: Sequence[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Escaped before the layout, which measures text.
        lines = [(escape_line(word), escape_line(text)) for word, text in self.lines]
        if options.max_width < _NARROW_COLUMNS:
            for word, text in lines:
                yield Text(f"  {word}", style="dim")
                if is_command(text):
                    yield _disable_wrapping(Text(f"    {text}"))
                else:
                    yield Padding(Text(text, overflow="fold"), (0, 0, 0, 4))
            return
        width = max(13, *(len(word) + 2 for word, _ in lines))
        for word, text in lines:
            if is_command(text):
                yield _disable_wrapping(
                    Text.assemble((f"{'  ' + word:{width}}", "dim"), f"  {text}")
                )
                continue
            grid = Table.grid(padding=(0, 2))
            grid.add_column(no_wrap=True, style="dim", width=width)
            grid.add_column(overflow="fold")
            grid.add_row(Text(f"  {word}"), Text(text))  # a str would be read as markup
            yield grid


def _disable_wrapping(line: Text) -> Text:
    """In one line, which a terminal may break, but not whoever copies it."""
    line.no_wrap, line.overflow = True, "ignore"
    return line
