"""What timings say: speed-up, what a task costs beside its work, where distribution pays.

The model: an iteration of T episodes of d seconds on P workers takes a + ceil(T/P) (d + o) and the
learning. `o` is the overhead of a task, `a` that of an iteration, both by least squares over all
that a fleet was measured on. Must not know: how it was timed, how it is worded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

import numpy as np

from rlflame.bench.base import Case, Cell
from rlflame.rollout.spec import Float64
from rlflame.statistics import Interval, compare_medians, compute_median_interval

#: A line through two points says nothing of how well it fits.
_FEWEST_ROWS = 3


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A cell beside the fastest one with the fewest workers."""

    cell: Cell
    seconds: Interval
    #: At most, with so many tasks on so many workers.
    theoretical: float
    speedup: Interval
    #: Shares of an iteration: learning, and collecting beyond what the episodes themselves take;
    #: absent where nobody knows how long those are.
    learning: float
    lost: float | None

    @property
    def efficiency(self) -> float:
        return self.speedup.value / self.theoretical


@dataclass(frozen=True, slots=True)
class FleetOverhead:
    """Of a fleet."""

    fleet: str
    task_s: float
    iteration_s: float
    cells: int
    #: Whether one of the two came out below 0, and is 0 for want of anything better.
    clamped: bool = False
    #: Of an iteration, by how much the farthest row misses the line.
    misses_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetGain:
    """Of a fleet beside another with as many workers, in percent of the other's throughput."""

    case: str
    workers: int
    seconds: tuple[float, float]
    percent: Interval

    @property
    def is_significant(self) -> bool:
        """Whether the interval leaves no doubt on which side it is."""
        return self.percent.low > 0.0 or self.percent.high < 0.0


def make_rows(cases: Sequence[Case], cells: Sequence[Cell]) -> list[ScalingRow]:
    """Case by case, in the order measured."""
    result = []
    for case in cases:
        case_cells = [cell for cell in cells if cell.case == case.name]
        if case_cells:
            base = find_reference(case_cells)
            result += [_make_row(case, cell, base) for cell in case_cells]
    return result


def find_reference(cells: Sequence[Cell]) -> Cell:
    """The fastest with the fewest workers: nobody is measured against his own overhead."""
    fewest = min(cell.workers for cell in cells)
    return min((c for c in cells if c.workers == fewest), key=lambda c: median(c.seconds))


def _make_row(case: Case, cell: Cell, base: Cell) -> ScalingRow:
    seconds, base_seconds = make_seconds_array(cell), make_seconds_array(base)
    change = compare_medians(base_seconds, seconds)
    total = float(np.median(seconds))
    learning = median(repetition.learn_s for repetition in cell.repetitions) / total
    lost = None
    if case.episode_ms is not None:
        work = case.iterations * _count_turns(case, cell) * _compute_task_s(case)
        lost = max(0.0, 1.0 - learning - work / total)
    return ScalingRow(
        cell,
        compute_median_interval(seconds),
        _count_turns(case, base) / _count_turns(case, cell),
        Interval(*(1.0 + value / 100.0 for value in (change.value, change.low, change.high))),
        learning,
        lost,
    )


def _count_turns(case: Case, cell: Cell) -> int:
    """Tasks that the busiest worker has one after the other."""
    return ceil(case.tasks / max(1, min(cell.workers, cell.capacity)))


def make_seconds_array(cell: Cell) -> Float64:
    return np.array(cell.seconds, np.float64)


def _compute_task_s(case: Case) -> float:
    """Of a task whose episodes sleep, one after the other."""
    assert case.episode_ms is not None
    return case.recipe.learning.rollout.envs_per_slot * case.episode_ms / 1000.0


def fit_overheads(cases: Sequence[Case], cells: Sequence[Cell]) -> list[FleetOverhead]:
    """Of every fleet that slept often enough to tell what a task costs from what an iteration does.

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


def _compute_lost_s(case: Case, cell: Cell) -> tuple[float, float]:
    """An iteration's tasks in a row, and its seconds that were neither work nor learning."""
    spent = (
        median(repetition.seconds - repetition.learn_s for repetition in cell.repetitions)
        / case.iterations
    )
    turns = _count_turns(case, cell)
    return turns, spent - turns * _compute_task_s(case)


def _fit(points: Float64) -> tuple[float, float, bool]:
    """Seconds a task and seconds an iteration, neither below 0, and whether one would have been."""
    turns, lost = points[:, 0], points[:, 1]
    (slope, level), *_ = np.linalg.lstsq(np.stack([turns, np.ones_like(turns)], 1), lost)
    if slope < 0.0:
        return 0.0, max(0.0, float(lost.mean())), True
    if level < 0.0:
        return max(0.0, float((turns @ lost) / (turns @ turns))), 0.0, True
    return float(slope), float(level), False


def compute_break_even_s(
    base: FleetOverhead, other: FleetOverhead, workers: tuple[int, int], episodes: int
) -> Interval | None:
    """Seconds an episode from which `there` is the faster; None where it never is.

    Between as little and as much as rows allow that lie from their lines as far as the farthest.
    """
    few, many = (ceil(episodes / count) for count in workers)
    if many >= few:
        return None
    more = (other.iteration_s + many * other.task_s) - (base.iteration_s + few * base.task_s)
    missed = base.misses_s + other.misses_s
    low, value, high = (
        max(0.0, lost / (few - many)) for lost in (more - missed, more, more + missed)
    )
    return Interval(value, low, high)


def compute_gains(
    cells: Sequence[Cell], base_fleet: str = "local", other_fleet: str = "flame"
) -> list[FleetGain]:
    """Wherever both were measured with as many workers."""
    base_cells = {(c.case, c.workers): c for c in cells if c.fleet == base_fleet}
    return [
        FleetGain(
            cell.case,
            cell.workers,
            (median(other.seconds), median(cell.seconds)),
            compare_medians(make_seconds_array(other), make_seconds_array(cell)),
        )
        for cell in cells
        if cell.fleet == other_fleet and (other := base_cells.get((cell.case, cell.workers)))
    ]


def has_same_bits(cells: Sequence[Cell], case: str) -> bool | None:
    """Whether every fleet and every repetition of a case learned the same weights."""
    return has_equal_digests(
        repetition.weights for c in cells if c.case == case for repetition in c.repetitions
    )


def has_equal_digests(digests: Iterable[str]) -> bool | None:
    """Whether all are one; None where there are no two to compare."""
    values = [*digests]
    return None if len(values) < 2 else len(set(values)) == 1
