"""The live view of a run or a sweep on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from rlflame.console.display import Display
from rlflame.console.output import format_pairs, format_table, make_display_stream
from rlflame.console.run_progress import RECENT_EPISODES, SeedProgress
from rlflame.console.run_text import (
    Pairs,
    format_absent_return,
    format_interquartile_mean,
    format_seed_counts,
)
from rlflame.storage.metrics import LIVE_METRICS
from rlflame.terminal_text import escape_controls, format_count, format_duration

if TYPE_CHECKING:
    from rlflame.console.base import RunStart

_REFRESHES_PER_S = 4
#: The width of the names, chosen so that lines that appear later do not shift the others.
_WORD_COLUMNS = 11
#: The number of lines that do not show seeds in the view of a sweep.
_OTHER_LINES = 8
#: The maximum number of workers whose episodes are listed one by one.
_MOST_COUNTS = 4
#: The columns of the table of seeds. If there is no room, the last columns are dropped.
_SEED_COLUMNS = ("  seed", "state", "evaluation", "steps", "done", "steps/s")


class LiveDisplay(Display):
    """Shows a banner, a view that changes during the run, and a final summary."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._console = console or EscapingConsole(
            markup=False, emoji=False, highlight=False, file=make_display_stream()
        )

    @contextlib.contextmanager
    def open(self, start: RunStart) -> Iterator[None]:
        with super().open(start):
            live = Live(
                get_renderable=self.render_view,
                console=self._console,
                refresh_per_second=_REFRESHES_PER_S,
                # The final summary replaces the view; after a failure, the last view stays.
                transient=True,
                redirect_stdout=False,
                # Notes appear above the view, unless standard error is redirected.
                redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
            )
            with live:
                # Rich hides the cursor; show it now, in case the process is killed.
                self._console.show_cursor(True)
                try:
                    yield
                except BaseException:
                    live.transient = False
                    raise

    def render_view(self) -> RenderableType:
        """Render the seeds of a sweep, the progress bar and the overall state."""
        lines = format_pairs(self._format_state(), self._console.width, _WORD_COLUMNS)
        seeds = self._format_seeds() if self.progress.is_sweep else []
        return Group(Text("\n".join(["", *seeds])), self._make_bar(), Text("\n".join(lines)))

    def _make_bar(self) -> Text:
        progress, console = self.progress, self._console
        full, empty = "=-" if console.options.ascii_only else "━─"
        times = f"  {format_duration(progress.elapsed_s)} elapsed"
        if (remaining_s := progress.remaining_s) is not None:
            times += f", {format_duration(remaining_s)} left"
        bar = Text(f"  {progress.fraction_done:4.0%}  ", style="bold")
        width = max(0, min(28, console.width - len(bar) - len(times)))
        num_full = int(progress.fraction_done * width)
        bar.append(full * num_full, "green").append(empty * (width - num_full), "dim")
        return bar.append(times, "not bold")

    def _format_seeds(self) -> list[str]:
        """Return a table of as many seeds as fit; running seeds have priority."""
        rows, room = self.progress.rows, max(1, self._console.height - _OTHER_LINES)
        seeds = sorted(rows, key=lambda seed: rows[seed].state != "running")
        visible = seeds if len(rows) <= room else seeds[: max(1, room - 1)]
        cells = [_SEED_COLUMNS, *(_format_cells(seed, rows[seed]) for seed in sorted(visible))]
        lines = format_table(cells, self._console.width)
        return lines + [f"  and {len(rows) - len(visible)} more"] * (len(visible) < len(rows))

    def _format_state(self) -> Pairs:
        """Return the overall state; for a single seed, also tasks and learning metrics."""
        progress, row, fleet = self.progress, self.progress.row, self.progress.fleet
        position = f"step {progress.steps:,}"
        if not progress.is_sweep:
            position += f", iteration {row.iteration:,}, episode {row.episodes:,}"
        lines = [("progress", f"{position}, {progress.steps_per_s:,.0f} steps/s")]
        workers = f"{format_count(fleet.workers, 'executor')} at work" if fleet.workers else ""
        if cluster := fleet.phase or workers:
            lines.append(("cluster", cluster))
        if progress.is_sweep:
            lines.append(("seeds", format_seed_counts(progress)))
            return [*lines, ("IQM so far", format_interquartile_mean(progress))]
        counts = {"submitted": fleet.count_tasks(), "running": fleet.count_tasks("running")}
        counts |= {"done": fleet.count_tasks("done"), "retried": fleet.retries}
        tasks = ", ".join(f"{number} {state}" for state, number in counts.items())
        lines.append(("evaluating" if fleet.purpose == "evaluate" else "rollouts", tasks))
        if len(episodes := fleet.list_episodes()) > 1:
            lines.append(("per worker", _format_episodes(episodes)))
        mean = row.recent_return
        text = "" if mean is None else f"{mean:,.2f} (last {RECENT_EPISODES} episodes)"
        lines.append(("return", text or format_absent_return(progress)))
        metrics = row.events.get("iteration", {})
        # The metrics that show whether learning is sound.
        values = [
            f"{label} {metrics[name]:{form}}"
            for name, (label, form) in LIVE_METRICS.items()
            if metrics.get(name) is not None
        ]
        lines += [("learning", ", ".join(values))] if values else []
        if record := row.events.get("evaluation"):
            score = f"{record['mean']:,.1f} [{record['low']:,.1f}, {record['high']:,.1f}]"
            mark = ", the best so far" if record["best"] else ""
            lines.append(("evaluation", f"{score} at step {record['steps']:,}{mark}"))
        return lines


def _format_episodes(counts: Sequence[int]) -> str:
    """Format the episodes of each worker, or their range if there are many workers."""
    if len(counts) <= _MOST_COUNTS:
        return f"{', '.join(f'{count:,}' for count in counts)} episodes"
    return f"{counts[0]:,} to {counts[-1]:,} episodes on {len(counts)} workers"


def _format_cells(seed: int, row: SeedProgress) -> tuple[str, ...]:
    score = "-" if row.score is None else f"{row.score:,.1f}"
    speed = f"{row.steps_per_s:,.0f}" if row.state == "running" else ""
    return (f"  {seed}", row.state, score, f"{row.steps:,}", f"{row.fraction_done:.0%}", speed)


class EscapingConsole(Console):
    """A console that escapes control characters in text, but not those of Rich.

    Rich marks cursor movements as control segments and adds colours when it writes segments. A
    control character in the text of any other segment therefore comes from a value.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(escape_controls(segment.text), segment.style)
