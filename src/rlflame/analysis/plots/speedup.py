"""Makes bar charts that show the speed-up with more workers."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from rlflame.analysis.plots.chart import Bars, Panels
from rlflame.config import regular_file
from rlflame.errors import CheckpointError

#: The accepted names of the column with the counts, and of the column with the fleets or other
#: alternatives.
UNITS, SIDES = ("workers", "learners"), ("fleet", "backend", "recipe")
_MOST_WORKERS = 1_000_000
#: The accepted range of seconds per step.
_LEAST_S, _MOST_S = 1e-30, 1e30

#: Run times in seconds (per step if the table has steps), by case and by (workers, fleet).
RunTimes = dict[str, dict[tuple[int, str], list[float]]]


def make_speedup_chart(table: Path) -> Bars | Panels:
    """Make a bar chart from a CSV table of run times, with one panel per case.

    The columns are workers (or learners), fleet (or backend or recipe), seconds and, optionally,
    steps and case. A bar shows the median of rows with the same workers and fleet. The baseline of
    a case (height 1) is the fastest fleet at the smallest number of workers, so that no fleet's
    overhead is hidden in its own baseline.
    """
    unit, times = _read_run_times(table)
    fleets = list(dict.fromkeys(fleet for part in times.values() for _, fleet in part))
    bars = [_make_bars(case, unit, part, fleets) for case, part in times.items()]
    title = f"Speed-up: {table.stem}"
    note = f"Medians of repetitions, relative to the fastest result with the fewest {unit}."
    if len(bars) == 1:
        return replace(bars[0], title=title, notes=(note,))
    return Panels(tuple(bars), (note,), title)


def _make_bars(
    title: str, unit: str, times: Mapping[tuple[int, str], list[float]], fleets: Sequence[str]
) -> Bars:
    """Return the bars of a case for all fleets, including those without results."""
    cost = {key: median(seconds) for key, seconds in times.items()}
    workers = sorted({count for count, _ in cost})
    base = min(seconds for (count, _), seconds in cost.items() if count == workers[0])
    heights = [[base / cost.get((count, fleet), np.nan) for count in workers] for fleet in fleets]
    return Bars(
        title=title,
        x_label=unit.capitalize(),
        y_label=f"Speed-up over {workers[0]} {unit[:-1] if workers[0] == 1 else unit}",
        groups=tuple(map(str, workers)),
        names=tuple(fleets),
        heights=np.array(heights),
        ideal=np.array(workers, np.float64) / workers[0],
    )


def _read_run_times(table: Path) -> tuple[str, RunTimes]:
    """Read a table; return its unit (`workers` or `learners`) and the run times."""
    times: RunTimes = {}
    line, unit, side = 1, UNITS[0], SIDES[0]
    try:
        rows = csv.DictReader(regular_file.read_lines(table, newline="", encoding="utf-8-sig"))
        head = rows.fieldnames or ()
        unit, side = (next((n for n in names if n in head), names[0]) for names in (UNITS, SIDES))
        for row in rows:
            line = rows.line_num
            case, key, seconds = _parse_row(row, unit, side)
            times.setdefault(case, {}).setdefault(key, []).append(seconds)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{table} is not UTF-8 text.", "check the file") from error
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{table} cannot be read: {reason}.", "check the file") from error
    except (LookupError, TypeError, ValueError, csv.Error) as error:
        raise CheckpointError(
            f"Line {line} of {table} is not a valid run.",
            f"the columns are {unit} (1 to {_MOST_WORKERS:,}), {side} (a name) and "
            "seconds (above 0)",
        ) from error
    if not times:
        raise CheckpointError(f"{table} has no rows.", "add a row for each run")
    return unit, times


def _parse_row(row: Mapping[str, str], unit: str, side: str) -> tuple[str, tuple[int, str], float]:
    """Return the case, (workers, fleet) and seconds per step of a row.

    An invalid cell raises an exception.
    """
    if None in row or None in row.values():
        raise ValueError("wrong number of cells")
    count, seconds, steps = int(row[unit]), float(row["seconds"]), float(row.get("steps", "1"))
    names = [row[name] for name in ("case", side) if name in row]
    if (
        not 1 <= count <= _MOST_WORKERS
        or not 0.0 < steps < math.inf
        or not _LEAST_S <= seconds / steps <= _MOST_S
        or not all(name.strip() and name.isprintable() for name in names)
    ):
        raise ValueError(row)
    return row.get("case", ""), (count, row[side]), seconds / steps
