"""What timings mean: speed-up, what a task costs beside its work, where Flame pays, what to do.

The model: an iteration of T tasks of d seconds on P workers takes a + ceil(T/P) (d + o) and the
learning. Least squares over the cells of a fleet give `o`, the overhead of a task, and `a`, that of
an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

import numpy as np

from rlflame.bench.case import Case
from rlflame.bench.result import Side, compute_gain, compute_median, compute_speedup
from rlflame.rollout.task import Float64
from rlflame.statistics import FEWEST_SEEDS, Interval
from rlflame.terminal_text import format_count

Row = dict[str, Any]
#: A line through two points says nothing about how well it fits.
_FEWEST_ROWS = 3
#: The number of episodes an iteration for which break-even times are given.
_EPISODES = 100
#: An efficiency below this is poor; latency or learning above these shares of the time is much.
_POOR, _MUCH_LATENCY, _MUCH_LEARNING = 0.6, 0.25, 0.3
#: Fewer tasks than this for each worker share the cost of an iteration badly.
_FEW_TURNS = 4


@dataclass(frozen=True, slots=True)
class FleetOverhead:
    """What a fleet costs."""

    fleet: str
    task_s: float
    iteration_s: float
    cells: int
    #: Whether one of the two came out below 0, and is 0 instead.
    clamped: bool = False
    #: By how much the farthest row misses the line, of an iteration.
    misses_s: float = 0.0


def make_rows(cases: Sequence[Case], cells: Sequence[Side]) -> list[Row]:
    """Each cell beside the fastest one of its case with the fewest workers, in the order measured.

    `theoretical` is the most that so many tasks allow on so many workers. `learning` and `lost` are
    shares of the time; what is lost is beyond learning and the episodes, if their length is known.
    """
    rows = []
    for case in cases:
        case_cells = [cell for cell in cells if cell.labels["case"] == case.name]
        # A fleet with more workers is never the base: its overhead would hide in the speed-up.
        base = min(
            case_cells,
            key=lambda cell: (cell.labels["workers"], _compute_median_s(cell)),
            default=None,
        )
        if base is not None:
            rows += [_make_row(case, cell, base) for cell in case_cells]
    return rows


def _make_row(case: Case, cell: Side, base: Side) -> Row:
    seconds, total_s = cell.list_values("seconds"), _compute_median_s(cell)
    turns = _count_turns(case, cell)
    theoretical = _count_turns(case, base) / turns
    speedup = compute_speedup(base.list_values("seconds"), seconds)
    learning = median(cell.list_values("learn_s")) / total_s
    lost = None
    if case.episode_ms is not None:
        work_s = case.iterations * turns * _compute_task_s(case)
        lost = max(0.0, 1.0 - learning - work_s / total_s)
    return {
        **{key: cell.labels[key] for key in ("case", "fleet", "workers", "start_s")},
        "times": len(seconds),
        "seconds": compute_median(seconds),
        "steps_per_s": cell.repetitions[0]["steps"] / total_s,
        "theoretical": theoretical,
        "speedup": speedup,
        "efficiency": speedup.value / theoretical,
        "learning": learning,
        "lost": lost,
    }


def _compute_median_s(cell: Side) -> float:
    return float(median(cell.list_values("seconds")))


def _count_turns(case: Case, cell: Side) -> int:
    """The tasks that the busiest worker has one after the other."""
    workers: int = min(cell.labels["workers"], cell.labels["capacity"])
    return ceil(case.tasks / max(1, workers))


def _compute_task_s(case: Case) -> float:
    """The time of a task whose episodes sleep one after the other."""
    assert case.episode_ms is not None
    return case.recipe.learning.rollout.envs_per_slot * case.episode_ms / 1000.0


def fit_overheads(cases: Sequence[Case], cells: Sequence[Side]) -> list[FleetOverhead]:
    """The overheads of every fleet whose cells tell those of a task and of an iteration apart.

    That takes rows with different numbers of tasks in a row, and one row more than two.
    """
    case_by_name = {case.name: case for case in cases if case.episode_ms is not None}
    result = []
    for fleet in dict.fromkeys(cell.labels["fleet"] for cell in cells):
        points = [
            _compute_lost_s(case, cell)
            for cell in cells
            if cell.labels["fleet"] == fleet
            and (case := case_by_name.get(cell.labels["case"])) is not None
        ]
        if len(points) >= _FEWEST_ROWS and len({turns for turns, _ in points}) > 1:
            task_s, iteration_s, clamped = _fit(np.array(points, np.float64))
            misses_s = max(abs(lost - iteration_s - turns * task_s) for turns, lost in points)
            result.append(FleetOverhead(fleet, task_s, iteration_s, len(points), clamped, misses_s))
    return result


def _compute_lost_s(case: Case, cell: Side) -> tuple[int, float]:
    """An iteration's tasks in a row, and its seconds that were neither work nor learning."""
    times_s = [run["seconds"] - run["learn_s"] for run in cell.repetitions]
    turns = _count_turns(case, cell)
    return turns, median(times_s) / case.iterations - turns * _compute_task_s(case)


def _fit(points: Float64) -> tuple[float, float, bool]:
    """Seconds a task, seconds an iteration, and whether one of them was below 0."""
    turns, lost = points[:, 0], points[:, 1]
    (slope, level), *_ = np.linalg.lstsq(np.stack([turns, np.ones_like(turns)], 1), lost)
    if slope < 0.0:
        return 0.0, max(0.0, float(lost.mean())), True
    if level < 0.0:
        return max(0.0, float((turns @ lost) / (turns @ turns))), 0.0, True
    return float(slope), float(level), False


def compute_break_even_s(
    base: FleetOverhead, other: FleetOverhead, workers: tuple[int, int], episodes: int = _EPISODES
) -> Interval | None:
    """Seconds an episode from which the other fleet is faster; None where it never is.

    The interval is that of rows which lie as far from their lines as the farthest.
    """
    few, many = (ceil(episodes / count) for count in workers)
    if many >= few:
        return None
    more_s = (other.iteration_s + many * other.task_s) - (base.iteration_s + few * base.task_s)
    missed_s = base.misses_s + other.misses_s
    low, value, high = (
        max(0.0, lost_s / (few - many)) for lost_s in (more_s - missed_s, more_s, more_s + missed_s)
    )
    return Interval(value, low, high)


def compute_gains(cells: Sequence[Side]) -> list[Row]:
    """The throughput of Flame over that of as many local workers, wherever both were measured."""
    sides = {
        tuple(cell.labels[key] for key in ("case", "workers", "fleet")): cell for cell in cells
    }
    gains = []
    for (case, workers, fleet), flame in sides.items():
        local = sides.get((case, workers, "local"))
        if fleet == "flame" and local is not None:
            percent = compute_gain(local.list_values("seconds"), flame.list_values("seconds"))
            gains.append(
                {
                    "case": case,
                    "workers": workers,
                    "times": min(len(local.repetitions), len(flame.repetitions)),
                    "local_s": _compute_median_s(local),
                    "flame_s": _compute_median_s(flame),
                    "percent": percent,
                    "gain_pct": percent.value,
                }
            )
    return gains


def make_advice(
    cases: Sequence[Case],
    cells: Sequence[Side],
    rows: Sequence[Row],
    overheads: Sequence[FleetOverhead],
    usable_cores: int,
) -> list[str]:
    """Sentences: which fleet was faster, from when Flame pays, what keeps workers from helping."""
    by_fleet = {overhead.fleet: overhead for overhead in overheads}
    sentences = _compare_fleets(cases, cells)
    if {"local", "flame"} <= by_fleet.keys():
        local, flame = by_fleet["local"], by_fleet["flame"]
        sentences += _describe_break_even(rows, local, flame, usable_cores)
    return sentences + _suggest_remedies({case.name: case.tasks for case in cases}, rows)


def _compare_fleets(cases: Sequence[Case], cells: Sequence[Side]) -> list[str]:
    """The faster fleet of each case that was measured on both."""
    texts = {
        "flame": "Flame was faster for {}: --fleet flame.",
        "local": "This machine was faster for {}: --local.",
        "none": "No difference was shown for {}: --local needs no cluster, and --repeat tells them "
        f"apart, {FEWEST_SEEDS} or more.",
    }
    names: dict[str, list[str]] = {key: [] for key in texts}
    slowest_first = sorted(cells, key=_compute_median_s, reverse=True)
    for case in cases:
        best = {
            cell.labels["fleet"]: cell.list_values("seconds")
            for cell in slowest_first
            if cell.labels["case"] == case.name
        }
        if {"local", "flame"} <= best.keys():
            local, flame = best["local"], best["flame"]
            speedup = compute_speedup(local, flame)
            winner = "flame" if speedup.low > 1.0 else "local" if speedup.high < 1.0 else "none"
            is_known = min(len(local), len(flame)) >= FEWEST_SEEDS
            names[winner if is_known else "none"].append(case.name)
    return [text.format(", ".join(names[key])) for key, text in texts.items() if names[key]]


def _describe_break_even(
    rows: Sequence[Row], local: FleetOverhead, flame: FleetOverhead, usable_cores: int
) -> list[str]:
    """Episode times from which executors pay, beside one worker and beside all cores here."""
    times = (row["times"] for row in rows if row["lost"] is not None)
    if flame.clamped or min(times) < FEWEST_SEEDS:
        return [
            "The cost of a task on Flame is lost in the differences between repetitions, so it is "
            f"unknown from when executors pay: --repeat {FEWEST_SEEDS} or more, or more of "
            "--episode-ms."
        ]
    executors = max(row["workers"] for row in rows if row["fleet"] == "flame")
    lines = []
    for workers in dict.fromkeys((1, usable_cores)):
        seconds = compute_break_even_s(local, flame, (workers, executors))
        pair = f"{format_count(executors, 'executor')} against {format_count(workers, 'worker')}"
        if seconds is None:
            lines.append(f"{pair} here cannot win: Flame pays with more executors than that.")
            continue
        value, low, high = (
            f"{1000.0 * bound_s:.3g}" for bound_s in (seconds.value, seconds.low, seconds.high)
        )
        lines.append(
            f"{pair} here win from {value} ms an episode on, with {_EPISODES} episodes an iteration"
            + f"; the rows allow anything from {low} to {high} ms" * (not low == value == high)
            + "."
        )
    return lines


def _suggest_remedies(tasks: dict[str, int], rows: Sequence[Row]) -> list[str]:
    """What keeps the most workers from their theoretical speed-up, and what helps."""
    most = max(row["workers"] for row in rows)
    if most == min(row["workers"] for row in rows):
        return ["One number of workers does not say how work is shared: --workers 1,2, and "
                "--compare local where this process was measured."]  # fmt: skip
    widest = [row for row in rows if row["workers"] == most]
    poor = [row for row in widest if row["efficiency"] < _POOR]
    learning = [row for row in poor if row["learning"] > _MUCH_LEARNING]
    waiting = [row for row in widest if row not in poor and (row["lost"] or 0.0) > _MUCH_LATENCY]
    if not poor and not waiting:
        least = min(row["efficiency"] for row in widest)
        return [f"{most} workers do at least {least:.0%} of what they could."]
    lost_share = max((row["lost"] or 0.0 for row in waiting), default=0.0)
    learning_share = max((row["learning"] for row in learning), default=0.0)
    texts = {
        f"Latency and dispatch take up to {lost_share:.0%} of {{}}: an environment whose episodes "
        "take longer, or several in a task (rollout.envs_per_slot).": waiting,
        f"Learning takes {learning_share:.0%} of {{}}, and workers do not shorten it: --set "
        "rollout.staleness=1 overlaps it where the algorithm allows.": learning,
        "More workers gain little for {}: an environment whose episodes take longer, or fewer "
        "workers.": [row for row in poor if row not in learning],
        f"Fewer than {_FEW_TURNS} tasks for each worker of {{}}: more episodes an iteration (100 "
        "or more on a cluster) share its cost.": [
            row for row in poor if tasks[row["case"]] < _FEW_TURNS * most
        ],
    }
    return [
        text.format(", ".join(dict.fromkeys(f"{row['case']} on {row['fleet']}" for row in group)))
        for text, group in texts.items()
        if group
    ]
