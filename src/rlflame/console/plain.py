"""A run as lines that read well in a log. Must not know: what runs, where numbers come from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlflame.console.formatting import format_pairs, wrap_text
from rlflame.console.output import print_note, print_report
from rlflame.console.recipe_summary import format_evaluation
from rlflame.console.run_progress import RunProgress
from rlflame.console.run_text import (
    format_headline,
    format_result_lines,
    format_retry,
    format_start_lines,
    format_status,
)
from rlflame.terminal_text import format_duration

if TYPE_CHECKING:
    from pathlib import Path

    from rlflame.console.base import RunResult, RunStart
    from rlflame.fleet.base import FleetEvent
    from rlflame.training.evaluation import EvaluationRecord
    from rlflame.training.trainer import Progress

#: A line is due with every such part of the budget...
_BUDGET_PARTS = 20
#: ...or when nothing has been said for so long.
_SILENCE_S = 300.0
_REINFORCE_LINE_ITERATIONS = 10


class PlainDisplay:
    """Lines that read well in a log: a banner, one now and then, and an end block."""

    def __init__(
        self,
        write: Callable[[str], None] = print_report,
        write_note: Callable[[str], None] = print_note,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._write_note = write_note
        self._clock = clock
        self.progress = RunProgress(clock)
        self._last_line_at_s, self._last_line_part, self._last_line_iteration = clock(), 0, 0

    def show_iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None:
        progress = self.progress
        progress.add_iteration(metrics, returns)
        assert progress.recipe_summary is not None
        if progress.recipe_summary.recipe.learning.algorithm == "reinforce":
            if (
                progress.iteration % _REINFORCE_LINE_ITERATIONS == 0
                or progress.fraction_done >= 1.0
            ):
                self._write_progress(self._format_reinforce_line())
        elif (
            progress.fraction_done >= 1.0
            or int(progress.fraction_done * _BUDGET_PARTS) > self._last_line_part
            or self._clock() >= self._last_line_at_s + _SILENCE_S
        ):
            self._write_progress(self._format_line())

    def show_evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None:
        mark = ", the best so far" if best else ""
        self._write(wrap_text(f"Evaluation at step {steps:,}: {format_evaluation(record)}{mark}"))

    def show_checkpoint(self, path: Path, progress: Progress) -> None: ...

    def show_fleet_event(self, event: FleetEvent) -> None:
        self.progress.add_fleet_event(event)
        if event.kind == "retried" and event.text:
            self.show_note(format_retry(event))
        elif event.kind in ("phase", "note") and event.text:
            self.show_note(event.text)

    def show_note(self, text: str) -> None:
        self._write_note(text)

    @contextlib.contextmanager
    def open(self, run: RunStart) -> Iterator[None]:
        self.progress.start(run)
        self._last_line_at_s, self._last_line_part = (
            self._clock(),
            int(self.progress.fraction_done * _BUDGET_PARTS),
        )
        self._write(wrap_text(format_headline(run)))
        for line in format_pairs(format_start_lines(run, self.progress)):
            self._write(line)
        yield

    def show_result(self, result: RunResult) -> None:
        self._write(format_status(result))
        for line in format_pairs(format_result_lines(result, self.progress)):
            self._write(line)

    def _write_progress(self, line: str) -> None:
        if self.progress.iteration != self._last_line_iteration:
            self._write(wrap_text(line))
        self._last_line_at_s, self._last_line_part = (
            self._clock(),
            int(self.progress.fraction_done * _BUDGET_PARTS),
        )
        self._last_line_iteration = self.progress.iteration

    def _format_reinforce_line(self) -> str:
        progress = self.progress
        assert progress.recipe_summary is not None
        total = progress.recipe_summary.iterations
        position = f"{progress.iteration}/{total}" if total else str(progress.iteration)
        mean, loss = progress.metrics.get("episode_return_mean"), progress.metrics.get("loss")
        return (
            f"Iteration {position:>7}  mean reward {_format_number(mean, '10,.2f')}  "
            f"loss {_format_number(loss, '10.4f')}  {progress.steps_per_s:,.0f} steps/s"
        )

    def _format_line(self) -> str:
        progress = self.progress
        remaining_s = progress.remaining_s
        remaining_text = (
            f"  {format_duration(remaining_s)} left"
            if remaining_s is not None and progress.fraction_done < 1.0
            else ""
        )
        return (
            f"{progress.fraction_done:4.0%}  step {progress.steps:>11,}  "
            f"return {_format_number(progress.recent_return, '10,.2f')}  "
            f"{progress.steps_per_s:>7,.0f} steps/s{remaining_text}"
        )


def _format_number(value: float | None, form: str) -> str:
    width = form.split(",")[0].split(".")[0]
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"
