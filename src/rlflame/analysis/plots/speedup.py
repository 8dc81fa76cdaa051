"""How much faster more workers are, from a table of run times. Must not know: how it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlflame.analysis.plots import run_times
from rlflame.analysis.plots.chart import BarGroups, Bars


def make_speedup_chart(table: Path) -> Bars | BarGroups:
    """Bars of a CSV with the columns workers (or learners), backend (or recipe), seconds and,
    where they differ, steps.

    Rows with equal workers and backend are repetitions; their median counts. One is the fastest of
    the backends with the fewest workers, so that no backend is measured against its own overhead.
    A column `case` tells pieces of work apart, each of which has a one and a plot of its own. Where
    others have more, a case of a single bar compares nothing and is left out.
    """
    times = run_times.read_run_times(table)
    unit, cost = times.unit, times.cost
    parts: dict[str, dict[tuple[int, str], float]] = {}
    for (count, (case, backend)), median in cost.items():
        parts.setdefault(case, {})[count, backend] = median
    comparable = {case: part for case, part in parts.items() if len(part) > 1} or parts
    single_cases = [case for case in parts if case not in comparable]
    remark = (
        f"With a single bar, and so not drawn: {', '.join(single_cases)}." if single_cases else ""
    )
    backends = list(dict.fromkeys(backend for part in comparable.values() for _, backend in part))
    bars = [_make_bars(case, unit, part, backends) for case, part in comparable.items()]
    title = f"Speed-up: {table.stem}"
    note = f"Medians of repetitions, beside the fastest with the fewest {unit}."
    if len(bars) == 1:
        return replace(bars[0], title=title, note=note, remark=remark)
    return BarGroups(title, tuple(bars), note, remark)


def _format_workers(number: int, unit: str) -> str:
    return f"{number} {unit[:-1] if number == 1 else unit}"


def _make_bars(
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
        y_label=f"Times as fast as {_format_workers(workers[0], unit)}",
        groups=tuple(map(str, workers)),
        names=tuple(backends),
        heights=np.array(heights),
        ideal=np.array(workers, np.float64) / workers[0],
    )
