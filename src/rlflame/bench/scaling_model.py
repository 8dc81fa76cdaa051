"""What timings mean: speed-up, what a task costs beside its work, where Flame pays, what to do.

The model: an iteration of T tasks of d seconds on P workers takes a + ceil(T/P) (d + o) and the
learning. Least squares over the cells of a fleet give `o`, the overhead of a task, and `a`, that of
an iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from rlflame.bench.case import Case
from rlflame.bench.result import Side, compute_speedup
from rlflame.fleet.factory import has_workers, is_remote
from rlflame.rollout.task import Float64
from rlflame.statistics import FEWEST_SEEDS, Interval, compare_medians, compute_median_interval
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


@dataclass(frozen=True)
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

    A fleet with more workers is never the base: its overhead would hide in the speed-up.
    """
    rows = []
    for case in cases:
        case_cells = [cell for cell in cells if cell.labels["case"] == case.name]
        fastest_first = sorted(case_cells, key=lambda cell: cell.compute_median("seconds"))
        base = min(fastest_first, key=lambda cell: int(cell.labels["workers"]), default=None)
        rows += [_make_row(case, cell, base) for cell in case_cells if base is not None]
    return rows


def _make_row(case: Case, cell: Side, base: Side) -> Row:
    """`theoretical` is the most that so many tasks allow on so many workers.

    `learning` and `lost` are shares of the time. Time is lost beyond learning and the episodes, and
    None where the length of episodes is unknown.
    """
    seconds, total_s = cell.list_values("seconds"), cell.compute_median("seconds")
    turns = _count_turns(case, cell)
    theoretical = _count_turns(case, base) / turns
    speedup = compute_speedup(base.list_values("seconds"), seconds)
    learning = cell.compute_median("learn_s") / total_s
    lost = None
    if case.episode_ms is not None:
        work_s = case.iterations * turns * _compute_task_s(case)
        lost = max(0.0, 1.0 - learning - work_s / total_s)
    return {
        **{key: cell.labels[key] for key in ("case", "fleet", "workers", "start_s")},
        "times": len(seconds),
        "seconds": compute_median_interval(seconds),
        "steps_per_s": cell.repetitions[0]["steps"] / total_s,
        "theoretical": theoretical,
        "speedup": speedup,
        "efficiency": speedup.value / theoretical,
        "learning": learning,
        "lost": lost,
    }


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
    points: dict[str, list[tuple[int, float]]] = {}
    for cell in cells:
        case = case_by_name.get(cell.labels["case"])
        if case is not None:
            points.setdefault(cell.labels["fleet"], []).append(_compute_lost_s(case, cell))
    return [
        _fit_overhead(fleet, np.array(fleet_points, np.float64))
        for fleet, fleet_points in points.items()
        if len(fleet_points) >= _FEWEST_ROWS and len({turns for turns, _ in fleet_points}) > 1
    ]


def _compute_lost_s(case: Case, cell: Side) -> tuple[int, float]:
    """An iteration's tasks in a row, and its seconds that were neither work nor learning."""
    times_s = [run["seconds"] - run["learn_s"] for run in cell.repetitions]
    turns = _count_turns(case, cell)
    return turns, float(np.median(times_s)) / case.iterations - turns * _compute_task_s(case)


def _fit_overhead(fleet: str, points: Float64) -> FleetOverhead:
    """The least squares of `[turns, lost seconds]` among overheads of 0 or more."""
    turns, lost = points.T
    (task_s, iteration_s), *_ = np.linalg.lstsq(np.stack([turns, np.ones_like(turns)], 1), lost)
    clamped = bool(min(task_s, iteration_s) < 0.0)
    if task_s < 0.0:
        task_s, iteration_s = 0.0, max(0.0, lost.mean())
    elif iteration_s < 0.0:
        task_s, iteration_s = max(0.0, (turns @ lost) / (turns @ turns)), 0.0
    misses_s = float(np.abs(lost - iteration_s - turns * task_s).max())
    return FleetOverhead(fleet, float(task_s), float(iteration_s), len(points), clamped, misses_s)


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
    ends_s = (more_s, more_s - missed_s, more_s + missed_s)
    return Interval(*(max(0.0, lost_s / (few - many)) for lost_s in ends_s))


def _find_pair(fleets: Iterable[str]) -> tuple[str, str] | None:
    """The fleet of worker processes here and the remote one, where both were measured."""
    local = [name for name in fleets if has_workers(name) and not is_remote(name)]
    remote = [name for name in fleets if is_remote(name)]
    return (local[0], remote[0]) if local and remote else None


def compute_gains(cells: Sequence[Side]) -> list[Row]:
    """The throughput of Flame over that of as many local workers, wherever both were measured."""
    sides: dict[tuple[str, int], dict[str, Side]] = {}
    for cell in cells:
        key = cell.labels["case"], cell.labels["workers"]
        sides.setdefault(key, {})[cell.labels["fleet"]] = cell
    gains = []
    for (case, workers), by_fleet in sides.items():
        if pair := _find_pair(by_fleet):
            local, flame = (by_fleet[name] for name in pair)
            percent = compare_medians(local.list_values("seconds"), flame.list_values("seconds"))
            gains.append(
                {
                    "case": case,
                    "workers": workers,
                    "times": min(len(local.repetitions), len(flame.repetitions)),
                    "local_s": local.compute_median("seconds"),
                    "flame_s": flame.compute_median("seconds"),
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
    if pair := _find_pair(by_fleet):
        local, flame = (by_fleet[name] for name in pair)
        sentences += _describe_break_even(rows, local, flame, usable_cores)
    return sentences + _suggest_remedies({case.name: case.tasks for case in cases}, rows)


def _compare_fleets(cases: Sequence[Case], cells: Sequence[Side]) -> list[str]:
    """The faster fleet of each case that was measured on both."""
    texts = {
        "remote": "Flame was faster for {}: --fleet flame.",
        "local": "This machine was faster for {}: --local.",
        "none": "No difference was shown for {}: --local needs no cluster, and --repeat tells them "
        f"apart, {FEWEST_SEEDS} or more.",
    }
    names: dict[str, list[str]] = {key: [] for key in texts}
    slowest_first = sorted(cells, key=lambda cell: -cell.compute_median("seconds"))
    for case in cases:
        best = {
            cell.labels["fleet"]: cell.list_values("seconds")
            for cell in slowest_first
            if cell.labels["case"] == case.name
        }
        if pair := _find_pair(best):
            local, flame = (best[name] for name in pair)
            speedup = compute_speedup(local, flame)
            winner = "remote" if speedup.low > 1.0 else "local" if speedup.high < 1.0 else "none"
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
            "The repetitions differ by more than a task costs on Flame, so it is unknown from when "
            f"executors pay: --repeat {FEWEST_SEEDS} or more, or more of --episode-ms."
        ]
    executors = max(row["workers"] for row in rows if row["fleet"] == flame.fleet)
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
        doubt = f"; the rows allow anything from {low} to {high} ms" if low != high else ""
        lines.append(
            f"{pair} here win from {value} ms an episode on, with {_EPISODES} episodes an "
            f"iteration{doubt}."
        )
    return lines


def _suggest_remedies(tasks: dict[str, int], rows: Sequence[Row]) -> list[str]:
    """What keeps the most workers from their theoretical speed-up, and what helps."""
    most = max(row["workers"] for row in rows)
    if most == min(row["workers"] for row in rows):
        return ["One number of workers does not say how work is shared: --workers 1,2."]
    widest = [row for row in rows if row["workers"] == most]
    poor = [row for row in widest if row["efficiency"] < _POOR]
    learning = [row for row in poor if row["learning"] > _MUCH_LEARNING]
    waiting = [row for row in widest if row not in poor and (row["lost"] or 0.0) > _MUCH_LATENCY]
    if not poor and not waiting:
        least = min(row["efficiency"] for row in widest)
        return [f"{most} workers do at least {least:.0%} of what they could."]
    lost_share = max((row["lost"] for row in waiting), default=0.0)
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
