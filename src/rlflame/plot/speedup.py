"""How much faster more workers are, from a table of run times. Must not know: how it is drawn."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlflame.errors import CheckpointError
from rlflame.plot import Bars, Cases

COLUMNS = ("workers", "backend", "seconds")
#: What the first column may be called.
UNITS = ("workers", "learners")
#: What the second may be.
SIDES = ("backend", "recipe")
_MOST_WORKERS = 1_000_000
#: A case and a backend.
Side = tuple[str, str]


def speedup(table: Path) -> Bars | Cases:
    """Bars of a CSV with the columns workers (or learners), backend (or recipe), seconds and,
    where they differ, steps.

    Rows with equal workers and backend are repetitions; their median counts. One is the fastest of
    the backends with the fewest workers, so that no backend is measured against its own overhead.
    A column `case` tells pieces of work apart, each of which has a one and a plot of its own. Where
    others have more, a case of a single bar compares nothing and is left out.
    """
    unit, cost = _seconds_per_step(table)
    parts: dict[str, dict[tuple[int, str], float]] = {}
    for (count, (case, backend)), median in cost.items():
        parts.setdefault(case, {})[count, backend] = median
    drawn = {case: part for case, part in parts.items() if len(part) > 1} or parts
    alone = [case for case in parts if case not in drawn]
    remark = f"With a single bar, and so not drawn: {', '.join(alone)}." if alone else ""
    backends = list(dict.fromkeys(backend for part in drawn.values() for _, backend in part))
    bars = [_of_one(case, unit, part, backends) for case, part in drawn.items()]
    title = f"Speed-up: {table.stem}"
    note = f"Medians of repetitions, beside the fastest with the fewest {unit}."
    if len(bars) == 1:
        return replace(bars[0], title=title, note=note, remark=remark)
    return Cases(title, tuple(bars), note, remark)


def _counted(number: int, unit: str) -> str:
    return f"{number} {unit[:-1] if number == 1 else unit}"


def _of_one(
    title: str, unit: str, cost: Mapping[tuple[int, str], float], backends: Sequence[str]
) -> Bars:
    """A row of bars for each backend, also for one that this case was not measured on."""
    workers = sorted({count for count, _ in cost})
    base = min(median for (count, _), median in cost.items() if count == workers[0])
    heights = [
        [base / cost.get((count, backend), np.nan) for count in workers] for backend in backends
    ]
    return Bars(
        title=title,
        x_label=unit.capitalize(),
        y_label=f"Times as fast as {_counted(workers[0], unit)}",
        groups=tuple(map(str, workers)),
        names=tuple(backends),
        heights=np.array(heights),
        ideal=np.array(workers, np.float64) / workers[0],
    )


def _seconds_per_step(table: Path) -> tuple[str, dict[tuple[int, Side], float]]:
    """What is counted, and the median of each number of them and side; per run where no steps are
    given."""
    found: dict[tuple[int, Side], list[float]] = {}
    try:
        with table.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            named = rows.fieldnames or ()
            unit = next((name for name in UNITS if name in named), UNITS[0])
            kind = next((name for name in SIDES if name in named), SIDES[0])
            missing = [name for name in (unit, kind, *COLUMNS[2:]) if name not in named]
            if missing:
                raise CheckpointError(
                    f"{table} has no column {missing[0]!r}.",
                    f"a table of run times has the columns {', '.join(COLUMNS)}",
                )
            for row in rows:
                workers, seconds = int(row[unit]), float(row["seconds"])
                seconds /= float(row.get("steps") or 1.0)
                if not 1 <= workers <= _MOST_WORKERS or not 0.0 < seconds < np.inf:
                    raise ValueError(f"{workers} {unit} in {seconds:g} seconds")
                side = (row.get("case") or "", row[kind])
                found.setdefault((workers, side), []).append(seconds)
    except OSError as error:
        raise CheckpointError(
            f"{table} cannot be read: {error.strerror or error}.", "check its name"
        ) from error
    except (ValueError, TypeError, ZeroDivisionError, csv.Error) as error:
        raise CheckpointError(
            f"{table} is no table of run times: {error}.",
            "workers and seconds are numbers above 0 in every row",
        ) from error
    if not found:
        raise CheckpointError(f"{table} has no rows.", "it needs one for each run")
    return unit, {key: float(np.median(seconds)) for key, seconds in found.items()}
