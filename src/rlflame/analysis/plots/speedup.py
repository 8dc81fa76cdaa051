"""How much faster more workers are: bars from a table of run times."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from rlflame.analysis.plots.chart import BarGroups, Bars
from rlflame.config import regular_file
from rlflame.errors import CheckpointError

#: The names that the first and the second column may have.
UNITS, SIDES = ("workers", "learners"), ("backend", "recipe")
_MOST_WORKERS = 1_000_000
#: Seconds a step that can be measured and drawn.
_LEAST_S, _MOST_S = 1e-30, 1e30

#: By case, the seconds of each number of workers and backend; a step, if steps are counted.
RunTimes = dict[str, dict[tuple[int, str], list[float]]]


def make_speedup_chart(table: Path) -> Bars | BarGroups:
    """Bars of a CSV with the columns workers (or learners), backend (or recipe), seconds and,
    where they differ, steps.

    Rows with equal workers and backend are repetitions; their median counts. One is the fastest of
    the backends with the fewest workers, so that no backend is measured against its own overhead.
    A column `case` separates pieces of work: each has its own one and its own plot. A case of a
    single bar compares nothing and is left out where other cases have more.
    """
    unit, times = _read_run_times(table)
    comparable = {case: part for case, part in times.items() if len(part) > 1} or times
    single_cases = ", ".join(case for case in times if case not in comparable)
    remark = f"With a single bar, and so not drawn: {single_cases}." if single_cases else ""
    backends = list(dict.fromkeys(backend for part in comparable.values() for _, backend in part))
    bars = [_make_bars(case, unit, part, backends) for case, part in comparable.items()]
    title = f"Speed-up: {table.stem}"
    note = f"Medians of repetitions, beside the fastest with the fewest {unit}."
    if len(bars) == 1:
        return replace(bars[0], title=title, note=note, remark=remark)
    return BarGroups(title, tuple(bars), note, remark)


def _make_bars(
    title: str, unit: str, times: Mapping[tuple[int, str], list[float]], backends: Sequence[str]
) -> Bars:
    """A row of bars for each backend, also for one that this case was not measured on."""
    cost = {key: median(seconds) for key, seconds in times.items()}
    workers = sorted({count for count, _ in cost})
    base = min(seconds for (count, _), seconds in cost.items() if count == workers[0])
    heights = [
        [base / cost.get((count, backend), np.nan) for count in workers] for backend in backends
    ]
    return Bars(
        title=title,
        x_label=unit.capitalize(),
        y_label=f"Times as fast as {workers[0]} {unit[:-1] if workers[0] == 1 else unit}",
        groups=tuple(map(str, workers)),
        names=tuple(backends),
        heights=np.array(heights),
        ideal=np.array(workers, np.float64) / workers[0],
    )


def _read_run_times(table: Path) -> tuple[str, RunTimes]:
    """The name of the first column, and the times."""
    times: RunTimes = {}
    try:
        rows = csv.DictReader(regular_file.read_lines(table, newline="", encoding="utf-8-sig"))
        unit, side = _choose_columns(table, [*(rows.fieldnames or ())])
        for row in rows:
            # Of a cell that goes over several lines the reader says the last.
            case, key, seconds = _parse_row(row, unit, side, f"{table}, line {rows.line_num}:")
            times.setdefault(case, {}).setdefault(key, []).append(seconds)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not text in UTF-8"
        raise CheckpointError(f"{table} cannot be read: {reason}.", "check the file") from error
    if not times:
        raise CheckpointError(f"{table} has no rows.", "it needs one for each run")
    return unit, times


def _choose_columns(table: Path, head: Sequence[str]) -> tuple[str, str]:
    unit, side = (next((n for n in names if n in head), names[0]) for names in (UNITS, SIDES))
    for name in (unit, side, "seconds"):
        if head.count(name) != 1:
            count = "two columns" if name in head else "no column"
            raise CheckpointError(
                f"{table} has {count} {name!r}, but {', '.join(map(repr, head)) or 'none'}.",
                "a table of run times has the columns workers, backend, seconds",
            )
    return unit, side


def _parse_row(
    row: Mapping[str, str], unit: str, side: str, place: str
) -> tuple[str, tuple[int, str], float]:
    """Case, workers with backend, and seconds; the error names the place and the field."""

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{place} {reason}.", "mend that line, or leave it out")

    def parse_positive(name: str) -> float:
        try:
            value = float(row[name])
        except ValueError:
            value = math.nan
        if not 0.0 < value < math.inf:
            raise refuse(f"{name} is {row[name]!r}, and not a number above 0")
        return value

    if None in row or None in row.values():
        raise refuse("there is not a cell for each column")
    count = row[unit].strip()
    if not count.isdecimal() or not 1 <= int(count) <= _MOST_WORKERS:
        raise refuse(f"{unit} is {count!r}, and not a number from 1 to {_MOST_WORKERS:,}")
    seconds = parse_positive("seconds") / (parse_positive("steps") if "steps" in row else 1.0)
    if not _LEAST_S <= seconds <= _MOST_S:
        raise refuse(f"{seconds:g} seconds{' a step' * ('steps' in row)} are not to be measured")
    for name in ("case", side):
        if name in row and not (row[name].strip() and row[name].isprintable()):
            raise refuse(f"{name} is {row[name]!r}, and not a name")
    return row.get("case", ""), (int(count), row[side]), seconds
