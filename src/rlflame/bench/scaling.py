"""Times the same work on several fleets with different numbers of workers.

In the model, an iteration takes a + ceil(T/P) * (d + o) seconds, plus the learning time, for T
tasks of d seconds each on P workers. A least-squares fit to the measurements of a fleet estimates
`o`, the overhead of a task, and `a`, the overhead of an iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

import numpy as np

from rlflame.analysis.report.document import Block, make_table
from rlflame.bench.case import Case, Stopwatch, run_case, warm_up
from rlflame.bench.result import BenchResult, Side, compute_speedup, format_bits, has_equal_digests
from rlflame.bench.runner import Benchmark, BenchSession
from rlflame.fleet.base import Fleet
from rlflame.fleet.factory import has_workers, is_remote
from rlflame.rollout import machine
from rlflame.rollout.task import Float64
from rlflame.statistics import FEWEST_SEEDS, compare_medians, compute_median_interval

Row = dict[str, Any]
#: The minimum number of points for a fit. Two points do not show how well a line fits.
_FEWEST_ROWS = 3
#: The number of episodes per iteration for which the break-even episode length is computed.
_EPISODES = 100
_COLUMNS = (
    *("case", "fleet", "workers", "answered", "tasks", ("repetitions", "times", "")),
    ("seconds", "seconds", ",.3f"),
    ("steps/s", "steps_per_s", ",.0f"),
    ("theoretical", "theoretical", ".2fx"),
    ("speed-up", "speedup", ".2fx"),
    ("gain of Flame, %", "gain_pct", "+.1f"),
    ("learning", "learning", ".1%"),
    ("latency and dispatch", "lost", ".1%"),
    ("start-up, s", "start_s", ".2f"),
)
_OVERHEADS = (
    "fleet",
    ("ms per task", "task_s", "ms"),
    ("ms per iteration", "iteration_s", "ms"),
    ("rows", "cells", ""),
)
_CSV_HEAD = ("case", "workers", "fleet", "seconds", "steps", "episodes", "collect_s", "learn_s",
             "retried")  # fmt: skip


class ScalingBenchmark(Benchmark):
    """Times the training of several cases."""

    name = "scaling"

    def warm_up(self, session: BenchSession, case: Case, fleet: Fleet) -> None:
        wait_for_all = case is self.case
        warm_up(case, fleet, session.stop, session.clock, wait_for_all=wait_for_all)

    def run_once(self, session: BenchSession, case: Case, fleet: Fleet) -> dict[str, Any]:
        return run_case(case, fleet, session.stop, Stopwatch(session.clock))

    def make_result(self, sides: Sequence[Side]) -> BenchResult:
        rows, overheads = make_rows(self.cases, sides), fit_overheads(self.cases, sides)
        facts: dict[str, Any] = {
            "cases": [_describe_case(case, sides) for case in self.cases],
            "cells": [{**cell.labels, "repetitions": cell.repetitions} for cell in sides],
            "rows": rows,
            "overheads": overheads,
            "advice": make_advice(rows, overheads, machine.count_usable_cores()),
        }
        work = {case.name: case.work for case in self.cases}
        runs = [{**cell.labels, **run} for cell in sides for run in cell.repetitions]
        return BenchResult(
            self.name,
            facts,
            _make_blocks(facts),
            [cell.make_measurement("seconds", "s", work[cell.labels["case"]]) for cell in sides],
            [_CSV_HEAD, *([run[name] for name in _CSV_HEAD] for run in runs)],
        )


def _describe_case(case: Case, cells: Sequence[Side]) -> dict[str, Any]:
    case_cells = [cell for cell in cells if cell.labels["case"] == case.name]
    weights = [digest for cell in case_cells for digest in cell.list_values("weights")]
    return {
        "name": case.name,
        "environment": case.env.id,
        "algorithm": case.recipe.learning.algorithm,
        "episode_ms": case.episode_ms,
        "tasks": case.tasks,
        "iterations": case.iterations,
        "same_bits": has_equal_digests(weights),
    }


def _make_blocks(facts: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = [
        "Medians; all rows of a case do the same training. The 95% bootstrap intervals need at "
        f"least {FEWEST_SEEDS} repetitions. Speed-up is relative to the fastest row with the "
        "fewest workers; theoretical is the limit that the number of tasks sets. Gain compares "
        "Flame's throughput with that of the same number of local workers. Latency and dispatch "
        "is the time beyond learning and episodes of known length. Start-up is not included in "
        "the other columns.",
        make_table(facts["rows"], _COLUMNS, 2),
        *format_bits([case["same_bits"] for case in facts["cases"]], "The learned weights"),
    ]
    if facts["overheads"]:
        blocks += [
            "Overheads are fitted to these rows by least squares. An iteration of T tasks on P "
            "workers takes the learning time, plus ceil(T / P) times the duration and overhead of "
            "a task, plus the overhead of an iteration.",
            make_table(facts["overheads"], _OVERHEADS),
        ]
    return [*blocks, *facts["advice"]]


def make_rows(cases: Sequence[Case], cells: Sequence[Side]) -> list[Row]:
    """Return a row for each side, with its speed-up relative to a baseline.

    The baseline of a case is its fastest side with the fewest workers. Each fleet's own baseline
    would hide its overhead.
    """
    rows = []
    for case in cases:
        case_cells = [cell for cell in cells if cell.labels["case"] == case.name]
        fastest_first = sorted(case_cells, key=lambda cell: cell.compute_median("seconds"))
        base = min(fastest_first, key=lambda cell: int(cell.labels["workers"]), default=None)
        rows += [_make_row(case, cell, base, case_cells) for cell in case_cells if base is not None]
    return rows


def _make_row(case: Case, cell: Side, base: Side, case_cells: Sequence[Side]) -> Row:
    """Return the row of a side. `theoretical` is the upper limit of the speed-up.

    `learning` is the share of the time spent on learning. `lost` is the share spent on neither
    learning nor episodes, or None if the length of episodes is unknown. `gain_pct` compares the
    throughput of Flame with that of the same number of local workers.
    """
    seconds, total_s = cell.list_values("seconds"), cell.compute_median("seconds")
    turns = _count_turns(case, cell)
    learning, idle, gain = cell.compute_median("learn_s") / total_s, None, None
    if case.episode_ms is not None:
        work_s = case.iterations * turns * _compute_task_s(case)
        idle = max(0.0, 1.0 - learning - work_s / total_s)
    by_fleet = {
        other.labels["fleet"]: other
        for other in case_cells
        if other.labels["workers"] == cell.labels["workers"]
    }
    pair = _find_pair(by_fleet)
    if pair and cell is by_fleet[pair[1]]:
        gain = compare_medians(by_fleet[pair[0]].list_values("seconds"), seconds)
    return {
        **{key: cell.labels[key] for key in ("case", "fleet", "workers", "answered", "start_s")},
        "tasks": case.tasks,
        "times": len(seconds),
        "seconds": compute_median_interval(seconds),
        "steps_per_s": cell.repetitions[0]["steps"] / total_s,
        "theoretical": _count_turns(case, base) / turns,
        "speedup": compute_speedup(base.list_values("seconds"), seconds),
        "gain_pct": gain,
        "learning": learning,
        "lost": idle,
    }


def _count_turns(case: Case, cell: Side) -> int:
    """Return the number of tasks that the busiest worker runs one after the other."""
    workers: int = min(cell.labels["workers"], cell.labels["capacity"])
    return ceil(case.tasks / max(1, workers))


def _compute_task_s(case: Case) -> float:
    """Return the duration of a task, whose episodes sleep one after another."""
    assert case.episode_ms is not None
    return case.recipe.learning.rollout.envs_per_slot * case.episode_ms / 1000.0


def _find_pair(fleets: Iterable[str]) -> tuple[str, str] | None:
    """Return the names of the local and the remote fleet, or None if one is missing."""
    local = [name for name in fleets if has_workers(name) and not is_remote(name)]
    remote = [name for name in fleets if is_remote(name)]
    return (local[0], remote[0]) if local and remote else None


def fit_overheads(cases: Sequence[Case], cells: Sequence[Side]) -> list[Row]:
    """Fit the overhead of a task and of an iteration for fleets with enough sides.

    Each row has the fleet, `task_s`, `iteration_s`, and the number of fitted sides as `cells`. A
    fit needs three sides, with at least two different numbers of tasks per worker.
    """
    case_by_name = {case.name: case for case in cases if case.episode_ms is not None}
    points: dict[str, list[tuple[int, float]]] = {}
    for cell in cells:
        case = case_by_name.get(cell.labels["case"])
        if case is not None:
            times_s = [run["seconds"] - run["learn_s"] for run in cell.repetitions]
            turns = _count_turns(case, cell)
            lost_s = np.median(times_s) / case.iterations - turns * _compute_task_s(case)
            points.setdefault(cell.labels["fleet"], []).append((turns, float(lost_s)))
    return [
        {"fleet": fleet, **_fit_line(np.array(fleet_points)), "cells": len(fleet_points)}
        for fleet, fleet_points in points.items()
        if len(fleet_points) >= _FEWEST_ROWS and len({turns for turns, _ in fleet_points}) > 1
    ]


def _fit_line(points: Float64) -> dict[str, float]:
    """Fit both overheads by least squares to `[tasks per worker, lost seconds]`.

    Neither overhead is below 0.
    """
    turns, lost_s = points.T
    (task_s, iteration_s), *_ = np.linalg.lstsq(np.stack([turns, np.ones_like(turns)], 1), lost_s)
    if task_s < 0.0:
        task_s, iteration_s = 0.0, max(0.0, lost_s.mean())
    elif iteration_s < 0.0:
        task_s, iteration_s = max(0.0, (turns @ lost_s) / (turns @ turns)), 0.0
    return {"task_s": float(task_s), "iteration_s": float(iteration_s)}


def compute_break_even_s(base: Row, other: Row, workers: tuple[int, int]) -> float | None:
    """Return the episode length in seconds above which `other` is faster, or None."""
    few, many = (ceil(_EPISODES / count) for count in workers)
    if many >= few:
        return None
    overhead_s = other["iteration_s"] + many * other["task_s"]
    base_s = base["iteration_s"] + few * base["task_s"]
    return max(0.0, float(overhead_s - base_s) / (few - many))


def make_advice(rows: Sequence[Row], overheads: Sequence[Row], cores: int) -> list[str]:
    """Return sentences that name the best fleets and compare Flame with this machine."""
    if min(row["times"] for row in rows) < FEWEST_SEEDS:
        return [f"Advice needs more repetitions: --repeat {FEWEST_SEEDS} or more."]
    choices = [
        f"{case}: {_choose_row([row for row in rows if row['case'] == case])}"
        for case in dict.fromkeys(row["case"] for row in rows)
    ]
    sentences = [f"The fewest workers at about the highest speed: {'; '.join(choices)}."]
    by_fleet = {overhead["fleet"]: overhead for overhead in overheads}
    if pair := _find_pair(by_fleet):
        local, flame = (by_fleet[name] for name in pair)
        # The fit raises negative overheads to 0, so an overhead of 0 means a poor fit.
        if not (flame["task_s"] and flame["iteration_s"]):
            return sentences
        executors = max(row["workers"] for row in rows if row["fleet"] == flame["fleet"])
        break_even_s = compute_break_even_s(local, flame, (cores, executors))
        speed, lengths = "not faster", "at any episode length"
        if break_even_s is not None:
            speed, lengths = "faster", f"for episodes of {1000.0 * break_even_s:.3g} ms or more"
        sentences.append(
            f"Given these overheads, {executors} executors are {speed} than {cores} local workers "
            f"{lengths}, with {_EPISODES} episodes per iteration."
        )
    return sentences


def _choose_row(rows: Sequence[Row]) -> str:
    """Name the row with the fewest workers that is about as fast as the fastest."""
    fastest = min(rows, key=lambda row: float(row["seconds"].value))
    equal = [row for row in rows if row["seconds"].low <= fastest["seconds"].high]
    choice = min(equal, key=lambda row: int(row["workers"]))
    return f"{choice['fleet']} with {choice['workers']}"
