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
from rlflame.console.formatting import aligned, table
from rlflame.console.output import as_json_text, report, say_aside, say_lines_aside
from rlflame.console.sweep_base import JobResult, JobStart
from rlflame.console.sweep_progress import Row, SeedsBoard
from rlflame.console.tracebacks import brief
from rlflame.errors import typed
from rlflame.statistics import FEWEST_SEEDS
from rlflame.storage.sweep_dir import written
from rlflame.storage.sweep_result import Outcome, SeedResult, Summary
from rlflame.text import escape_line, format_count, format_duration

#: A line of all seeds together is due with every such part of the budget.
_PARTS = 20


class QuietSeeds:
    """The folder at the end, and on standard error what went wrong."""

    def note(self, text: str) -> None: ...

    @contextlib.contextmanager
    def begin(self, start: JobStart, board: SeedsBoard) -> Iterator[None]:
        del start, board
        yield

    def event(self, seed: int, event: Mapping[str, Any]) -> None: ...

    def ended(self, seed: int, outcome: Outcome) -> None:
        if outcome.error is not None:
            say_lines_aside(failed(seed, outcome))

    def finished(self, result: JobResult) -> None:
        report(escape_line(str(result.folder)))


class JsonSeeds(QuietSeeds):
    """One document at the end; notes go to standard error."""

    def __init__(self) -> None:
        self._board: SeedsBoard | None = None

    def note(self, text: str) -> None:
        say_aside(text)

    @contextlib.contextmanager
    def begin(self, start: JobStart, board: SeedsBoard) -> Iterator[None]:
        del start
        self._board = board
        yield

    def finished(self, result: JobResult) -> None:
        board = self._board
        seconds = max(result.seconds, 1e-9) if result.began else None
        report(
            as_json_text(
                {
                    "version": __version__,
                    "folder": str(result.folder),
                    "began": result.began,
                    "seconds": seconds and round(seconds, 3),
                    "steps_per_s": board and seconds and round(board.own_steps / seconds, 1),
                    "plot": result.plot and str(result.plot),
                    **result.summary.as_dict(),
                },
                indent=2,
            )
        )


class PlainSeeds:
    """Lines that read well in a log: a banner, one as each seed ends, one of all now and then."""

    def __init__(
        self, out: Callable[[str], None] = report, aside: Callable[[str], None] = say_lines_aside
    ) -> None:
        self._out = out
        self._aside = aside
        self._board: SeedsBoard | None = None
        self._part = 0

    def note(self, text: str) -> None:
        self._aside(escape_line(text))

    @contextlib.contextmanager
    def begin(self, start: JobStart, board: SeedsBoard) -> Iterator[None]:
        self._board, self._part = board, int(board.share * _PARTS)
        self._out(f"rlflame {__version__}")
        for line in aligned(banner(start, board)):
            self._out(line)
        yield

    def event(self, seed: int, event: Mapping[str, Any]) -> None:
        board = self._board
        assert board is not None
        if event.get("event") == "iteration" and int(board.share * _PARTS) > self._part:
            self._part = int(board.share * _PARTS)
            self._out(f"{board.share:4.0%}  {together(board)}")

    def ended(self, seed: int, outcome: Outcome) -> None:
        assert self._board is not None
        if outcome.error is not None:
            self._aside(failed(seed, outcome))
        else:
            self._out(f"Seed {seed} {outcome.end}: {', '.join(standing(self._board.rows[seed]))}")

    def finished(self, result: JobResult) -> None:
        self._out(ending(result))
        for line in [*seeds_table(result.summary), "", *aligned(closing(result, self._board))]:
            self._out(line)


def banner(start: JobStart, board: SeedsBoard) -> list[tuple[str, str]]:
    facts, share = start.facts, start.shares
    at_once = f"{share.at_once} side by side"
    if start.fleet != "here":
        where = f"{at_once}, on one fleet: {format_count(start.workers, 'executor')} at most"
    elif share.workers:
        where = f"{at_once}, each with {format_count(share.workers, 'local worker')}"
    else:
        where = f"{at_once}, each in a process of its own"
    lines = [pair for pair in facts.lines() if pair[0] != "algorithm"]
    preset = f", preset {start.facts.preset}" if start.facts.preset else ""
    algorithm = f"{facts.recipe.learning.algorithm.upper()}{preset}"
    lines[1:1] = [
        ("algorithm", algorithm),
        ("seeds", f"{written(start.seeds)} ({format_count(len(start.seeds), 'run')}), {where}"),
    ]
    lines.append(("folder", str(start.folder)))
    if start.resumed:
        finished = board.number("finished")
        lines.append(("resumed", f"{finished} of {len(start.seeds)} finished before"))
    return lines


def standing(row: Row) -> list[str]:
    """One seed's cells: steps, last evaluation, speed."""
    evaluated = "-" if row.evaluation is None else f"{row.evaluation:,.1f}"
    cells = [f"step {row.steps:,}", f"evaluation {evaluated}"]
    return [*cells, f"{row.steps_per_s:,.0f} steps/s"] if row.state == "running" else cells


def together(board: SeedsBoard) -> str:
    """All seeds in one line."""
    found = board.iqm
    iqm = f"IQM so far {found[0]:,.1f} of {format_count(found[1], 'seed')}" if found else ""
    states = ("running", "finished", "failed")
    numbers = [f"{board.number(state)} {state}" for state in states if board.number(state)]
    speed = f"{board.steps_per_s:,.0f} steps/s"
    return "; ".join(filter(None, [f"step {board.steps:,}, {speed}, {', '.join(numbers)}", iqm]))


def failed(seed: int, outcome: Outcome) -> str:
    assert outcome.error is not None
    detail = brief(outcome.error.detail, outcome.error.message).rstrip()
    message = escape_line(outcome.error.message)
    return f"Seed {seed} failed: {message}" + (f"\n{detail}" if detail else "")


def ending(result: JobResult) -> str:
    if not result.began:
        return "All seeds were finished already."
    if result.complete:
        return "Finished"
    return "Failed" if result.failures else "Stopped"


def seeds_table(summary: Summary) -> list[str]:
    header = ("  seed", "state", "steps", "evaluation", "best")
    return table([header, *map(_cells, summary.seeds)])


def _cells(one: SeedResult) -> tuple[str, ...]:
    evaluation = one.evaluation
    score = "-"
    if evaluation is not None:
        score = f"{evaluation['mean']:,.1f} [{evaluation['low']:,.1f}, {evaluation['high']:,.1f}]"
    best = "-" if one.best_return is None else f"{one.best_return:,.1f}"
    return (f"  {one.seed}", one.state, f"{one.steps:,}", score, best)


def closing(result: JobResult, board: SeedsBoard | None) -> list[tuple[str, str]]:
    """What the seeds say together."""
    found, lines = result.summary, []
    if board is not None and result.began:
        seconds = max(result.seconds, 1e-9)
        speed = f"{format_count(board.own_steps, 'step')} ({board.own_steps / seconds:,.0f}/s)"
        lines.append(("time", f"{format_duration(seconds)}, {speed}"))
    lines += statistics(found)
    lines.append(("files", str(result.folder)))
    if result.complete:
        lines.append(("next", typed("report", result.folder)))
    return lines


def statistics(found: Summary) -> list[tuple[str, str]]:
    final = found.final
    if final is None:
        return []
    scored = f"of {format_count(final.seeds, 'seed')}" if final.seeds == len(found.seeds) else (
        f"of {final.seeds} of {len(found.seeds)} seeds"
    )  # fmt: skip
    iqm = f"{final.iqm.value:,.1f}"
    if final.seeds >= FEWEST_SEEDS:
        iqm += f", 95% interval [{final.iqm.low:,.1f}, {final.iqm.high:,.1f}]"
    lines = [
        ("IQM", f"{iqm} {scored}, final evaluations"),
        ("mean", f"{final.mean:,.1f} ± {final.std:,.1f}"),
        ("worst", f"{final.worst:,.1f}, seed {found.worst_seed}"),
    ]
    if found.p2 is not None:
        steps, best = found.p2
        lines.append((
            "P2",
            f"{best.mean:,.1f} ± {best.std:,.1f}, the best mean over seeds, at step {steps:,}",
        ))  # fmt: skip
    if found.p4 is not None:
        lines.append((
            "P4", f"{found.p4.mean:,.1f} ± {found.p4.std:,.1f}, the last 5% of the evaluations"
        ))  # fmt: skip
    return lines


def rows_shown(rows: Sequence[Row], most: int) -> tuple[list[Row], int]:
    """The seeds there is room for, those that run first, in their order; and how many are left."""
    if len(rows) <= most:
        return [*rows], 0
    order = {"running": 0, "failed": 1, "waiting": 2}
    chosen = sorted(rows, key=lambda row: order.get(row.state, 3))[: max(1, most - 1)]
    return [row for row in rows if row in chosen], len(rows) - len(chosen)
