"""Prints the progress of a run or a sweep as log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlflame.console.display import Display
from rlflame.console.output import print_report, wrap_text
from rlflame.console.recipe_summary import format_evaluation
from rlflame.console.run_text import (
    format_absent_return,
    format_interquartile_mean,
    format_seed_counts,
)
from rlflame.terminal_text import format_duration

if TYPE_CHECKING:
    from rlflame.console.base import RunStart
    from rlflame.storage.sweep_folder import SeedOutcome
    from rlflame.training.evaluation import EvaluationRecord

#: A line is printed each time another 1/20 of the budget is spent, or after 300 s without one.
_BUDGET_PARTS = 20
_SILENCE_S = 300.0
#: If iterations consist of whole episodes, every tenth iteration prints a line, as in Flame's
#: example.
_EPISODE_LINE_ITERATIONS = 10


class PlainDisplay(Display):
    """Prints a banner, occasional progress lines, and a final summary."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._clock = clock
        self._last_part, self._last_line_s = 0, clock()

    def show_start(self, start: RunStart) -> None:
        super().show_start(start)
        self._mark_line()

    def show_event(self, event: Mapping[str, Any], seed: int | None = None) -> None:
        super().show_event(event, seed)
        if event["event"] == "phase" and event["text"]:
            self.show_note(event["text"])
        elif event["event"] == "iteration":
            self._show_progress()

    def show_evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        super().show_evaluation(steps, record, best)
        mark = ", the best so far" if best else ""
        print_report(wrap_text(f"Evaluation at step {steps:,}: {format_evaluation(record)}{mark}"))

    def show_seed_end(self, seed: int, outcome: SeedOutcome) -> None:
        super().show_seed_end(seed, outcome)
        if outcome.error is None:
            row = self.progress.rows[seed]
            score = "-" if row.score is None else f"{row.score:,.1f}"
            print_report(f"Seed {seed} {outcome.end}: step {row.steps:,}, evaluation {score}")

    def _mark_line(self) -> None:
        self._last_part = int(self.progress.fraction_done * _BUDGET_PARTS)
        self._last_line_s = self._clock()

    def _show_progress(self) -> None:
        progress = self.progress
        if progress.summary.episodes_per_iteration and not progress.is_sweep:
            is_tenth = progress.row.iteration % _EPISODE_LINE_ITERATIONS == 0
            is_due = is_tenth or progress.fraction_done == 1
        else:
            is_due = (
                int(progress.fraction_done * _BUDGET_PARTS) > self._last_part
                or self._clock() >= self._last_line_s + _SILENCE_S
            )
        if is_due:
            self._mark_line()
            print_report(wrap_text("  ".join(self._format_cells())))

    def _format_cells(self) -> list[str]:
        progress, row, remaining_s = self.progress, self.progress.row, self.progress.remaining_s
        cells = [f"{progress.fraction_done:4.0%}", f"step {progress.steps:>11,}"]
        if not progress.is_sweep:
            mean, loss = progress.final_return, row.events["iteration"].get("loss")
            if progress.summary.episodes_per_iteration:
                total = progress.summary.iterations
                position = f"{row.iteration}/{total}" if total else str(row.iteration)
                cells = [f"Iteration {position:>7}"]
            if mean is None:
                cells.append(format_absent_return(progress))
                cells += [] if row.score is None else [f"evaluation {row.score:,.1f}"]
            else:
                cells.append(f"mean return {mean:>10,.2f}")
            cells += [] if loss is None else [f"loss {loss:10.4f}"]
        cells.append(f"{progress.steps_per_s:>7,.0f} steps/s")
        if remaining_s:
            cells.append(f"{format_duration(remaining_s)} left")
        if progress.is_sweep:
            iqm = format_interquartile_mean(progress)
            cells.append(f"{format_seed_counts(progress)}; IQM {iqm}")
        return cells
