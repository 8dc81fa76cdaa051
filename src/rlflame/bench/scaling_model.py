"""What timings mean: speed-up, what a task costs beside its work, where Flame pays, what to do.

The model: an iteration of T tasks of d seconds on P workers takes a + ceil(T/P) (d + o) and the
learning. Least squares over the cells of a fleet give `o`, the overhead of a task, and `a`, that of
an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Any

import numpy as np

from rlflame.bench.case import Case, Repetition
from rlflame.bench.result import compute_gain, compute_median, compute_speedup
from rlflame.rollout.spec import Float64
from rlflame.statistics import FEWEST_SEEDS, Interval
from rlflame.terminal_text import format_count

#: A line through two points says nothing about how well it fits.
_FEWEST_ROWS = 3
#: The number of episodes an iteration for which break-even times are given.
_EPISODES = 100
#: An efficiency below this is poor; latency or learning above these shares of the time is much.
_POOR, _MUCH_LATENCY, _MUCH_LEARNING = 0.6, 0.25, 0.3
#: Fewer tasks than this for each worker share the cost of an iteration badly.
_FEW_TURNS = 4


@dataclass(slots=True)
class Cell:
    """One case on one fleet with one number of workers."""

    case: str
    fleet: str
    workers: int
    #: How many tasks the fleet can run at one moment, and workers that have answered.
    capacity: int
    answered: int
    #: From opening the fleet to the end of its first iteration; for its first case alone.
    start_s: float | None
    repetitions: list[Repetition] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.case}, {self.fleet} with {self.workers}"

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(repetition.seconds for repetition in self.repetitions)

    @property
    def retried(self) -> tuple[int, ...]:
        return tuple(repetition.retried for repetition in self.repetitions)


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A cell beside the fastest one with the fewest workers."""

    cell: Cell
    seconds: Interval
    #: The most that so many tasks allow on so many workers.
    theoretical: float
    speedup: Interval
    #: Shares of the time: learning, and collecting beyond the episodes themselves, if known.
    learning: float
    lost: float | None

    @property
    def efficiency(self) -> float:
        return self.speedup.value / self.theoretical

    @property
    def label(self) -> str:
        return f"{self.cell.case} on {self.cell.fleet}"

    def as_dict(self) -> dict[str, Any]:
        cell = self.cell
        return {
            **{name: getattr(cell, name) for name in ("case", "fleet", "workers", "start_s")},
            **{name: getattr(self, name) for name in self.__slots__ if name != "cell"},
            "efficiency": self.efficiency,
            "times": len(cell.repetitions),
            "steps_per_s": cell.repetitions[0].steps / self.seconds.value,
        }


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


def make_rows(cases: Sequence[Case], cells: Sequence[Cell]) -> list[ScalingRow]:
    """Case by case, in the order measured."""
    result = []
    for case in cases:
        case_cells = [cell for cell in cells if cell.case == case.name]
        # The fastest with the fewest workers, so that no fleet is beside its own overhead.
        base = min(case_cells, key=lambda cell: (cell.workers, median(cell.seconds)), default=None)
        if base is not None:
            result += [_make_row(case, cell, base) for cell in case_cells]
    return result


def _make_row(case: Case, cell: Cell, base: Cell) -> ScalingRow:
    total, turns = median(cell.seconds), _count_turns(case, cell)
    learning = median(repetition.learn_s for repetition in cell.repetitions) / total
    lost = None
    if case.episode_ms is not None:
        work_s = case.iterations * turns * _compute_task_s(case)
        lost = max(0.0, 1.0 - learning - work_s / total)
    return ScalingRow(
        cell,
        compute_median(cell.seconds),
        _count_turns(case, base) / turns,
        compute_speedup(base.seconds, cell.seconds),
        learning,
        lost,
    )


def _count_turns(case: Case, cell: Cell) -> int:
    """The tasks that the busiest worker has one after the other."""
    return ceil(case.tasks / max(1, min(cell.workers, cell.capacity)))


def _compute_task_s(case: Case) -> float:
    """The time of a task whose episodes sleep one after the other."""
    assert case.episode_ms is not None
    return case.recipe.learning.rollout.envs_per_slot * case.episode_ms / 1000.0


def fit_overheads(cases: Sequence[Case], cells: Sequence[Cell]) -> list[FleetOverhead]:
    """The overheads of every fleet whose cells tell those of a task and of an iteration apart.

    That takes rows with different numbers of tasks in a row, and one row more than two.
    """
    case_by_name = {case.name: case for case in cases if case.episode_ms is not None}
    result = []
    for fleet in dict.fromkeys(cell.fleet for cell in cells):
        fleet_cells = [cell for cell in cells if cell.fleet == fleet and cell.case in case_by_name]
        points = [_compute_lost_s(case_by_name[cell.case], cell) for cell in fleet_cells]
        if len(points) >= _FEWEST_ROWS and len({turns for turns, _ in points}) > 1:
            task_s, iteration_s, clamped = _fit(np.array(points, np.float64))
            misses_s = max(abs(lost - iteration_s - turns * task_s) for turns, lost in points)
            result.append(FleetOverhead(fleet, task_s, iteration_s, len(points), clamped, misses_s))
    return result


def _compute_lost_s(case: Case, cell: Cell) -> tuple[int, float]:
    """An iteration's tasks in a row, and its seconds that were neither work nor learning."""
    times_s = (repetition.seconds - repetition.learn_s for repetition in cell.repetitions)
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


def compute_gains(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The throughput of Flame over that of as many local workers, wherever both were measured."""
    local = {(cell.case, cell.workers): cell for cell in cells if cell.fleet == "local"}
    gains = []
    for cell in cells:
        base = local.get((cell.case, cell.workers))
        if cell.fleet == "flame" and base is not None:
            percent = compute_gain(base.seconds, cell.seconds)
            gains.append(
                {
                    "case": cell.case,
                    "workers": cell.workers,
                    "times": min(len(base.repetitions), len(cell.repetitions)),
                    "local_s": median(base.seconds),
                    "flame_s": median(cell.seconds),
                    "percent": percent,
                    "gain_pct": percent.value,
                }
            )
    return gains


def make_advice(
    cases: Sequence[Case],
    rows: Sequence[ScalingRow],
    overheads: Sequence[FleetOverhead],
    usable_cores: int,
) -> list[str]:
    """Sentences: which fleet was faster, from when Flame pays, what keeps workers from helping."""
    by_fleet = {overhead.fleet: overhead for overhead in overheads}
    sentences = _compare_fleets(cases, rows)
    if {"local", "flame"} <= by_fleet.keys():
        local, flame = by_fleet["local"], by_fleet["flame"]
        sentences += _advise_break_even(rows, local, flame, usable_cores)
    return sentences + _advise_workers({case.name: case.tasks for case in cases}, rows)


def _compare_fleets(cases: Sequence[Case], rows: Sequence[ScalingRow]) -> list[str]:
    """The faster fleet of each case that was measured on both."""
    texts = {
        "flame": "Flame was faster for {}: --fleet flame.",
        "local": "This machine was faster for {}: --local.",
        "none": "No difference was shown for {}: --local needs no cluster, and --repeat tells them "
        f"apart, {FEWEST_SEEDS} or more.",
    }
    names: dict[str, list[str]] = {key: [] for key in texts}
    slowest_first = sorted(rows, key=lambda row: -row.seconds.value)
    for case in cases:
        best = {row.cell.fleet: row.cell for row in slowest_first if row.cell.case == case.name}
        if {"local", "flame"} <= best.keys():
            local, flame = best["local"].seconds, best["flame"].seconds
            speedup = compute_speedup(local, flame)
            winner = "flame" if speedup.low > 1.0 else "local" if speedup.high < 1.0 else "none"
            is_known = min(len(local), len(flame)) >= FEWEST_SEEDS
            names[winner if is_known else "none"].append(case.name)
    return [text.format(", ".join(names[key])) for key, text in texts.items() if names[key]]


def _advise_break_even(
    rows: Sequence[ScalingRow], local: FleetOverhead, flame: FleetOverhead, usable_cores: int
) -> list[str]:
    """Episode times from which executors pay, beside one worker and beside all cores here."""
    times = (len(row.cell.repetitions) for row in rows if row.lost is not None)
    if flame.clamped or min(times) < FEWEST_SEEDS:
        return [
            "The cost of a task on Flame is lost in the differences between repetitions, so it is "
            f"unknown from when executors pay: --repeat {FEWEST_SEEDS} or more, or more of "
            "--episode-ms."
        ]
    executors = max(row.cell.workers for row in rows if row.cell.fleet == "flame")
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


def _advise_workers(tasks: dict[str, int], rows: Sequence[ScalingRow]) -> list[str]:
    """What keeps the most workers from their theoretical speed-up, and what helps."""
    most = max(row.cell.workers for row in rows)
    if most == min(row.cell.workers for row in rows):
        return ["One number of workers does not say how work is shared: --workers 1,2, and "
                "--compare local where this process was measured."]  # fmt: skip
    widest = [row for row in rows if row.cell.workers == most]
    poor = [row for row in widest if row.efficiency < _POOR]
    learning = [row for row in poor if row.learning > _MUCH_LEARNING]
    waiting = [row for row in widest if row not in poor and (row.lost or 0.0) > _MUCH_LATENCY]
    if not poor and not waiting:
        least = min(row.efficiency for row in widest)
        return [f"{most} workers do at least {least:.0%} of what they could."]
    lost_share = max((row.lost or 0.0 for row in waiting), default=0.0)
    learning_share = max((row.learning for row in learning), default=0.0)
    texts = {
        f"Latency and dispatch take up to {lost_share:.0%} of {{}}: an environment whose episodes "
        "take longer, or several in a task (rollout.envs_per_slot).": waiting,
        f"Learning takes {learning_share:.0%} of {{}}, and workers do not shorten it: --set "
        "rollout.staleness=1 overlaps it where the algorithm allows.": learning,
        "More workers gain little for {}: an environment whose episodes take longer, or fewer "
        "workers.": [row for row in poor if row not in learning],
        f"Fewer than {_FEW_TURNS} tasks for each worker of {{}}: more episodes an iteration (100 "
        "or more on a cluster) share its cost.": [
            row for row in poor if tasks[row.cell.case] < _FEW_TURNS * most
        ],
    }
    return [
        text.format(", ".join(dict.fromkeys(row.label for row in group)))
        for text, group in texts.items()
        if group
    ]
