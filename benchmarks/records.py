"""Read the records in docs/results and format their numbers as Markdown."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.statistics import FEWEST_SEEDS, MeanStd, compute_iqm_interval

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
#: Smaller returns are printed with one decimal.
SMALL = 100
#: Times from LONG_S on are printed in whole minutes, times below SHORT_S in hundredths.
LONG_S, SHORT_S = 20 * 60, 30

#: A row of a CSV file.
Row = dict[str, str]
#: The steps and the returns of a seed.
Curve = tuple[Any, Any]


def read_records(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def group_curves(rows: Iterable[Row]) -> list[Curve]:
    """Make one curve for each seed, sorted by seed."""
    seeds: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        point = (int(row["step"]), float(row["return_mean"]))
        seeds.setdefault(int(row["seed"]), []).append(point)
    return [
        (np.array([x for x, _ in points]), np.array([y for _, y in points]))
        for _, points in sorted(seeds.items())
    ]


def read_study(record: str, study: str) -> tuple[list[Curve], dict[int, float]]:
    """Return the evaluations of each seed during training, and the final returns."""
    rows = [row for row in read_records(record) if row["study"] == study]
    ends = {int(row["seed"]): float(row["return_mean"]) for row in rows if row["final"] == "1"}
    return group_curves(row for row in rows if row["final"] == "0"), dict(sorted(ends.items()))


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table, in which columns of numbers are aligned to the right."""
    body = [*rows]
    marks = ["---"]
    for place in range(1, len(head)):
        cells = [row[place] for row in body if row[place]]
        marks.append("--:" if all(re.match(r"-?\d", cell) for cell in cells) else "---")
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
    return "\n".join([lines[0], f"|{'|'.join(marks)}|", *lines[1:]])


def format_return(value: float, beside: float | None = None) -> str:
    """Format a return, with one decimal if it (or the mean `beside`) is small."""
    places = 1 if abs(value if beside is None else beside) < SMALL else 0
    return f"{value:z,.{places}f}"  # prints -0.0 as 0.0


def format_mean(result: MeanStd) -> str:
    return f"{format_return(result.mean)} ± {format_return(result.std, beside=result.mean)}"


def format_iqm(values: np.ndarray) -> str:
    """Format the interquartile mean, with its interval if there are enough seeds."""
    result = compute_iqm_interval([values])
    interval = f" [{format_return(result.low)}, {format_return(result.high)}]"
    return format_return(result.value) + interval * (len(values) >= FEWEST_SEEDS)


def format_range(values: Sequence[float], places: int) -> str:
    """Format the median with the lowest and the highest value."""
    middle = f"{np.median(values):.{places}f}"
    if len(values) == 1:
        return middle
    return f"{middle} [{min(values):.{places}f}, {max(values):.{places}f}]"


def format_minutes(seconds: float) -> str:
    places = 0 if seconds >= LONG_S else 1 if seconds >= SHORT_S else 2
    return f"{seconds / 60:.{places}f}"


def format_list(names: list[str]) -> str:
    """Join names in a sentence."""
    return ", ".join(names[:-1]) + " and " + names[-1] if names[1:] else names[0]
