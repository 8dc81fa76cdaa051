"""A table of run times, read: what is counted, and how long each number of them took.

Must not know: what is made of it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rlflame.config import regular_file
from rlflame.errors import CheckpointError

COLUMNS = ("workers", "backend", "seconds")
#: What the first column may be called.
UNITS = ("workers", "learners")
#: What the second may be.
SIDES = ("backend", "recipe")
#: Where they differ: the steps of a run, and the piece of work it did.
_STEPS, _CASE = "steps", "case"
_MOST_WORKERS = 1_000_000
#: Seconds a step, beyond which nobody has measured anything and nothing can be drawn.
_LEAST_S, _MOST_S = 1e-30, 1e30
#: A case and a backend.
CaseBackend = tuple[str, str]


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Of each number and side the median of its repetitions, in seconds a step; per run where no
    steps are given."""

    unit: str
    cost: dict[tuple[int, CaseBackend], float]


class _RowError(Exception):
    """What is not as it must be in a row."""


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


def _parse_table(table: Path, lines: Iterator[list[str]]) -> RunTimes:
    head = next(lines, [])
    unit, kind = (next((n for n in names if n in head), names[0]) for names in (UNITS, SIDES))
    seen = ", ".join(map(repr, head)) or "none at all"
    for name in (unit, kind, *COLUMNS[2:]):
        if name not in head:
            raise CheckpointError(
                f"{table} has no column {name!r}, but {seen}.",
                f"a table of run times has the columns {', '.join(COLUMNS)}",
            )
        if head.count(name) > 1:
            raise CheckpointError(f"{table} has two columns {name!r}.", "leave one of them out")
    seconds_by_key: dict[tuple[int, CaseBackend], list[float]] = {}
    for cells in lines:
        if not cells:
            continue
        try:
            key, seconds = _parse_row(
                dict(zip(head, _check_cells(head, cells), strict=True)), unit, kind
            )
        except _RowError as error:
            # Of a cell that goes over several lines the reader says the last.
            number = getattr(lines, "line_num", 0)
            raise CheckpointError(
                f"{table} is no table of run times: in line {number} {error}.",
                "mend that line, or leave it out",
            ) from None
        seconds_by_key.setdefault(key, []).append(seconds)
    if not seconds_by_key:
        raise CheckpointError(f"{table} has no rows.", "it needs one for each run")
    return RunTimes(unit, {key: median(seconds) for key, seconds in seconds_by_key.items()})


def _check_cells(head: Sequence[str], cells: list[str]) -> list[str]:
    if len(cells) != len(head):
        raise _RowError(f"there is not a cell for each of {len(head)} columns, but {len(cells)}")
    return cells


def _parse_row(row: dict[str, str], unit: str, kind: str) -> tuple[tuple[int, CaseBackend], float]:
    count = row[unit].strip()
    if not count.isdecimal() or not 1 <= int(count) <= _MOST_WORKERS:
        raise _RowError(f"{unit} is {count!r}, and not a number from 1 to {_MOST_WORKERS:,}")
    seconds = _parse_positive(row, "seconds")
    if _STEPS in row:
        seconds /= _parse_positive(row, _STEPS)
    if not _LEAST_S <= seconds <= _MOST_S:
        raise _RowError(f"{seconds:g} seconds{' a step' * (_STEPS in row)} are not to be measured")
    for name in (_CASE, kind):
        if name in row and not (row[name].strip() and row[name].isprintable()):
            raise _RowError(f"{name} is {row[name]!r}, and not a name")
    return (int(count), (row.get(_CASE, ""), row[kind])), seconds


def _parse_positive(row: dict[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise _RowError(f"{name} is {row[name]!r}, and not a number above 0")
    return value
