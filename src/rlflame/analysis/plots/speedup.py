"""How much faster more workers are: bars from a table of run times."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rlflame.analysis.plots.chart import BarGroups, Bars
from rlflame.config import regular_file
from rlflame.errors import CheckpointError

#: The names that the first and the second column may have.
UNITS, SIDES = ("workers", "learners"), ("backend", "recipe")
_MOST_WORKERS = 1_000_000
#: Seconds a step that can be measured and drawn.
_LEAST_S, _MOST_S = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class RunTimes:
    """By case, the median seconds of each number of workers and backend; a step, if steps are
    counted."""

    unit: str
    cases: dict[str, dict[tuple[int, str], float]]


def make_speedup_chart(table: Path) -> Bars | BarGroups:
    """Bars of a CSV with the columns workers (or learners), backend (or recipe), seconds and,
    where they differ, steps.

    Rows with equal workers and backend are repetitions; their median counts. One is the fastest of
    the backends with the fewest workers, so that no backend is measured against its own overhead.
    A column `case` separates pieces of work: each has its own one and its own plot. A case of a
    single bar compares nothing and is left out where other cases have more.
    """
    times = read_run_times(table)
    comparable = {case: part for case, part in times.cases.items() if len(part) > 1} or times.cases
    single_cases = [case for case in times.cases if case not in comparable]
    remark = (
        f"With a single bar, and so not drawn: {', '.join(single_cases)}." if single_cases else ""
    )
    backends = list(dict.fromkeys(backend for part in comparable.values() for _, backend in part))
    bars = [_make_bars(case, times.unit, part, backends) for case, part in comparable.items()]
    title = f"Speed-up: {table.stem}"
    note = f"Medians of repetitions, beside the fastest with the fewest {times.unit}."
    if len(bars) == 1:
        return replace(bars[0], title=title, note=note, remark=remark)
    return BarGroups(title, tuple(bars), note, remark)


def _make_bars(
    title: str, unit: str, cost: Mapping[tuple[int, str], float], backends: Sequence[str]
) -> Bars:
    """A row of bars for each backend, also for one that this case was not measured on."""
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


def read_run_times(table: Path) -> RunTimes:
    try:
        lines = regular_file.read_lines(table, newline="", encoding="utf-8-sig")
        return _parse_table(table, csv.reader(lines))
    except OSError as error:
        raise CheckpointError(
            f"{table} cannot be read: {error.strerror or error}.", "check its name"
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{table} is no table of run times: it is not text in UTF-8.", "save it as CSV"
        ) from error
    except csv.Error as error:
        raise CheckpointError(f"{table} is no table: {error}.", "save it as CSV") from error


def _parse_table(table: Path, lines: Any) -> RunTimes:
    head: list[str] = next(lines, [])
    unit, side = (next((n for n in names if n in head), names[0]) for names in (UNITS, SIDES))
    _check_head(table, head, (unit, side, "seconds"))
    cases: dict[str, dict[tuple[int, str], list[float]]] = {}
    for cells in filter(None, lines):
        try:
            case, key, seconds = _parse_row(head, cells, unit, side)
        except ValueError as error:
            # Of a cell that goes over several lines the reader says the last.
            raise CheckpointError(
                f"{table} is no table of run times: in line {lines.line_num} {error}.",
                "mend that line, or leave it out",
            ) from None
        cases.setdefault(case, {}).setdefault(key, []).append(seconds)
    if not cases:
        raise CheckpointError(f"{table} has no rows.", "it needs one for each run")
    return RunTimes(
        unit,
        {case: {key: median(s) for key, s in part.items()} for case, part in cases.items()},
    )


def _check_head(table: Path, head: list[str], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in head:
            raise CheckpointError(
                f"{table} has no column {name!r}, but {', '.join(map(repr, head)) or 'none'}.",
                "a table of run times has the columns workers, backend, seconds",
            )
        if head.count(name) > 1:
            raise CheckpointError(f"{table} has two columns {name!r}.", "leave one of them out")


def _parse_row(
    head: list[str], cells: list[str], unit: str, side: str
) -> tuple[str, tuple[int, str], float]:
    """Case, workers with backend, and seconds; a ValueError names the invalid field."""
    if len(cells) != len(head):
        raise ValueError(f"there is not a cell for each of {len(head)} columns, but {len(cells)}")
    row = dict(zip(head, cells, strict=True))
    count = row[unit].strip()
    if not count.isdecimal() or not 1 <= int(count) <= _MOST_WORKERS:
        raise ValueError(f"{unit} is {count!r}, and not a number from 1 to {_MOST_WORKERS:,}")
    seconds = _parse_positive(row, "seconds")
    if "steps" in row:
        seconds /= _parse_positive(row, "steps")
    if not _LEAST_S <= seconds <= _MOST_S:
        raise ValueError(
            f"{seconds:g} seconds{' a step' * ('steps' in row)} are not to be measured"
        )
    for name in ("case", side):
        if name in row and not (row[name].strip() and row[name].isprintable()):
            raise ValueError(f"{name} is {row[name]!r}, and not a name")
    return row.get("case", ""), (int(count), row[side]), seconds


def _parse_positive(row: Mapping[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} is {row[name]!r}, and not a number above 0")
    return value
