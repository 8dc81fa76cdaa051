"""A job of seeds in words: what its lines say.

sweep_live.py shows it on a terminal; here are the lines of a log, the JSON of a program, and the
folder alone. Everything goes through the one mouth, console/output.py. Must not know: how anything
is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlflame import __version__
from rlflame.console.formatting import format_pairs, format_table
from rlflame.console.output import as_json_text, print_note, print_note_lines, print_report
from rlflame.console.sweep_base import SweepResult, SweepStart
from rlflame.console.sweep_progress import SeedProgress, SweepProgress
from rlflame.console.tracebacks import shorten_traceback
from rlflame.errors import format_command
from rlflame.statistics import FEWEST_SEEDS
from rlflame.storage.sweep_dir import format_seeds
from rlflame.storage.sweep_result import SeedOutcome, SeedResult, SweepSummary
from rlflame.terminal_text import escape_line, format_count, format_duration

#: A line of all seeds together is due with every such part of the budget.
_BUDGET_PARTS = 20


class QuietSweepDisplay:
    """The folder at the end, and on standard error what went wrong."""

    def show_note(self, text: str) -> None: ...

    @contextlib.contextmanager
    def open(self, start: SweepStart, progress: SweepProgress) -> Iterator[None]:
        del start, progress
        yield

    def show_event(self, seed: int, event: Mapping[str, Any]) -> None: ...

    def show_outcome(self, seed: int, outcome: SeedOutcome) -> None:
        if outcome.error is not None:
            print_note_lines(format_failure(seed, outcome))

    def show_result(self, result: SweepResult) -> None:
        print_report(escape_line(str(result.folder)))


class JsonSweepDisplay(QuietSweepDisplay):
    """One document at the end; notes go to standard error."""

    def __init__(self) -> None:
        self._progress: SweepProgress | None = None

    def show_note(self, text: str) -> None:
        print_note(text)

    @contextlib.contextmanager
    def open(self, start: SweepStart, progress: SweepProgress) -> Iterator[None]:
        del start
        self._progress = progress
        yield

    def show_result(self, result: SweepResult) -> None:
        progress = self._progress
        elapsed_s = max(result.elapsed_s, 1e-9) if result.has_trained else None
        print_report(
            as_json_text(
                {
                    "version": __version__,
                    "folder": str(result.folder),
                    "began": result.has_trained,
                    "seconds": elapsed_s and round(elapsed_s, 3),
                    "steps_per_s": progress
                    and elapsed_s
                    and round(progress.steps_since_start / elapsed_s, 1),
                    "plot": result.plot and str(result.plot),
                    **result.summary.as_dict(),
                },
                indent=2,
            )
        )


class PlainSweepDisplay:
    """Lines that read well in a log: a banner, one as each seed ends, one of all now and then."""

    def __init__(
        self,
        write: Callable[[str], None] = print_report,
        write_note: Callable[[str], None] = print_note_lines,
    ) -> None:
        self._write = write
        self._write_note = write_note
        self._progress: SweepProgress | None = None
        self._last_line_part = 0

    def show_note(self, text: str) -> None:
        self._write_note(escape_line(text))

    @contextlib.contextmanager
    def open(self, start: SweepStart, progress: SweepProgress) -> Iterator[None]:
        self._progress, self._last_line_part = progress, int(progress.fraction_done * _BUDGET_PARTS)
        self._write(f"rlflame {__version__}")
        for line in format_pairs(format_start_lines(start, progress)):
            self._write(line)
        yield

    def show_event(self, seed: int, event: Mapping[str, Any]) -> None:
        progress = self._progress
        assert progress is not None
        if (
            event.get("event") == "iteration"
            and int(progress.fraction_done * _BUDGET_PARTS) > self._last_line_part
        ):
            self._last_line_part = int(progress.fraction_done * _BUDGET_PARTS)
            self._write(f"{progress.fraction_done:4.0%}  {format_totals(progress)}")

    def show_outcome(self, seed: int, outcome: SeedOutcome) -> None:
        assert self._progress is not None
        if outcome.error is not None:
            self._write_note(format_failure(seed, outcome))
        else:
            self._write(
                f"Seed {seed} {outcome.end}: "
                f"{', '.join(format_seed_cells(self._progress.rows[seed]))}"
            )

    def show_result(self, result: SweepResult) -> None:
        self._write(format_status(result))
        for line in [
            *format_seeds_table(result.summary),
            "",
            *format_pairs(format_result_lines(result, self._progress)),
        ]:
            self._write(line)


def format_start_lines(start: SweepStart, progress: SweepProgress) -> list[tuple[str, str]]:
    recipe_summary, resources = start.recipe_summary, start.resources
    concurrency_text = f"{resources.concurrent_seeds} side by side"
    if start.fleet != "here":
        placement = (
            f"{concurrency_text}, on one fleet: {format_count(start.workers, 'executor')} at most"
        )
    elif resources.workers_per_seed:
        placement = (
            f"{concurrency_text}, each with "
            f"{format_count(resources.workers_per_seed, 'local worker')}"
        )
    else:
        placement = f"{concurrency_text}, each in a process of its own"
    lines = [pair for pair in recipe_summary.format_lines() if pair[0] != "algorithm"]
    preset = f", preset {start.recipe_summary.preset}" if start.recipe_summary.preset else ""
    algorithm = f"{recipe_summary.recipe.learning.algorithm.upper()}{preset}"
    lines[1:1] = [
        ("algorithm", algorithm),
        (
            "seeds",
            f"{format_seeds(start.seeds)} ({format_count(len(start.seeds), 'run')}), {placement}",
        ),
    ]
    lines.append(("folder", str(start.folder)))
    if start.resumed:
        finished = progress.count_seeds("finished")
        lines.append(("resumed", f"{finished} of {len(start.seeds)} finished before"))
    return lines


def format_seed_cells(row: SeedProgress) -> list[str]:
    """One seed's cells: steps, last evaluation, speed."""
    evaluation_text = "-" if row.evaluation is None else f"{row.evaluation:,.1f}"
    cells = [f"step {row.steps:,}", f"evaluation {evaluation_text}"]
    return [*cells, f"{row.steps_per_s:,.0f} steps/s"] if row.state == "running" else cells


def format_totals(progress: SweepProgress) -> str:
    """All seeds in one line."""
    iqm_estimate = progress.iqm
    iqm_text = (
        f"IQM so far {iqm_estimate[0]:,.1f} of {format_count(iqm_estimate[1], 'seed')}"
        if iqm_estimate
        else ""
    )
    states = ("running", "finished", "failed")
    state_counts = [
        f"{progress.count_seeds(state)} {state}" for state in states if progress.count_seeds(state)
    ]
    speed = f"{progress.steps_per_s:,.0f} steps/s"
    return "; ".join(
        filter(None, [f"step {progress.steps:,}, {speed}, {', '.join(state_counts)}", iqm_text])
    )


def format_failure(seed: int, outcome: SeedOutcome) -> str:
    assert outcome.error is not None
    detail = shorten_traceback(outcome.error.detail, outcome.error.message).rstrip()
    message = escape_line(outcome.error.message)
    return f"Seed {seed} failed: {message}" + (f"\n{detail}" if detail else "")


def format_status(result: SweepResult) -> str:
    if not result.has_trained:
        return "All seeds were finished already."
    if result.complete:
        return "Finished"
    return "Failed" if result.failures else "Stopped"


def format_seeds_table(summary: SweepSummary) -> list[str]:
    header = ("  seed", "state", "steps", "evaluation", "best")
    return format_table([header, *map(_format_result_cells, summary.seeds)])


def _format_result_cells(result: SeedResult) -> tuple[str, ...]:
    evaluation = result.evaluation
    score = "-"
    if evaluation is not None:
        score = f"{evaluation['mean']:,.1f} [{evaluation['low']:,.1f}, {evaluation['high']:,.1f}]"
    best = "-" if result.best_return is None else f"{result.best_return:,.1f}"
    return (f"  {result.seed}", result.state, f"{result.steps:,}", score, best)


def format_result_lines(
    result: SweepResult, progress: SweepProgress | None
) -> list[tuple[str, str]]:
    """What the seeds say together."""
    summary, lines = result.summary, []
    if progress is not None and result.has_trained:
        elapsed_s = max(result.elapsed_s, 1e-9)
        speed = (
            f"{format_count(progress.steps_since_start, 'step')} "
            f"({progress.steps_since_start / elapsed_s:,.0f}/s)"
        )
        lines.append(("time", f"{format_duration(elapsed_s)}, {speed}"))
    lines += format_statistics(summary)
    lines.append(("files", str(result.folder)))
    if result.complete:
        lines.append(("next", format_command("report", result.folder)))
    return lines


def format_statistics(summary: SweepSummary) -> list[tuple[str, str]]:
    final = summary.final
    if final is None:
        return []
    seeds_text = (
        "of "
        f"{format_count(final.seeds, 'seed')}"
    ) if final.seeds == len(summary.seeds) else (
        f"of {final.seeds} of {len(summary.seeds)} seeds"
    )  # fmt: skip
    iqm = f"{final.iqm.value:,.1f}"
    if final.seeds >= FEWEST_SEEDS:
        iqm += f", 95% interval [{final.iqm.low:,.1f}, {final.iqm.high:,.1f}]"
    lines = [
        ("IQM", f"{iqm} {seeds_text}, final evaluations"),
        ("mean", f"{final.mean:,.1f} ± {final.std:,.1f}"),
        ("worst", f"{final.worst:,.1f}, seed {summary.worst_seed}"),
    ]
    if summary.p2 is not None:
        steps, best = summary.p2
        lines.append((
            "P2",
            f"{best.mean:,.1f} ± {best.std:,.1f}, the best mean over seeds, at step {steps:,}",
        ))  # fmt: skip
    if summary.p4 is not None:
        lines.append((
            "P4", f"{summary.p4.mean:,.1f} ± {summary.p4.std:,.1f}, the last 5% of the evaluations"
        ))  # fmt: skip
    return lines


def select_rows(rows: Sequence[SeedProgress], limit: int) -> tuple[list[SeedProgress], int]:
    """The seeds there is room for, those that run first, in their order; and how many are left."""
    if len(rows) <= limit:
        return [*rows], 0
    order = {"running": 0, "failed": 1, "waiting": 2}
    visible_rows = sorted(rows, key=lambda row: order.get(row.state, 3))[: max(1, limit - 1)]
    return [row for row in rows if row in visible_rows], len(rows) - len(visible_rows)
