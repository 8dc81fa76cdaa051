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
from rlflame.statistics import Interval, compare_medians, median_interval

#: A line through two points says nothing of how well it fits.
_FEWEST_ROWS = 3


@dataclass(frozen=True, slots=True)
class Row:
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
class Overhead:
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
class Gain:
    """Of a fleet beside another with as many workers, in percent of the other's throughput."""

    case: str
    workers: int
    seconds: tuple[float, float]
    percent: Interval

    @property
    def shown(self) -> bool:
        """Whether the interval leaves no doubt on which side it is."""
        return self.percent.low > 0.0 or self.percent.high < 0.0


def rows(cases: Sequence[Case], cells: Sequence[Cell]) -> list[Row]:
    """Case by case, in the order measured."""
    found = []
    for case in cases:
        mine = [cell for cell in cells if cell.case == case.name]
        if mine:
            base = reference(mine)
            found += [_row(case, cell, base) for cell in mine]
    return found


def reference(cells: Sequence[Cell]) -> Cell:
    """The fastest with the fewest workers: nobody is measured against his own overhead."""
    fewest = min(cell.workers for cell in cells)
    return min((c for c in cells if c.workers == fewest), key=lambda c: median(c.seconds))


def _row(case: Case, cell: Cell, base: Cell) -> Row:
    seconds, theirs = seconds_of(cell), seconds_of(base)
    change = compare_medians(theirs, seconds)
    whole = float(np.median(seconds))
    learning = median(one.learn_s for one in cell.repetitions) / whole
    lost = None
    if case.episode_ms is not None:
        work = case.iterations * _turns(case, cell) * _task_s(case)
        lost = max(0.0, 1.0 - learning - work / whole)
    return Row(
        cell,
        median_interval(seconds),
        _turns(case, base) / _turns(case, cell),
        Interval(*(1.0 + value / 100.0 for value in (change.value, change.low, change.high))),
        learning,
        lost,
    )


def _turns(case: Case, cell: Cell) -> int:
    """Tasks that the busiest worker has one after the other."""
    return ceil(case.tasks / max(1, min(cell.workers, cell.capacity)))


def seconds_of(cell: Cell) -> Float64:
    return np.array(cell.seconds, np.float64)


def _task_s(case: Case) -> float:
    """Of a task whose episodes sleep, one after the other."""
    assert case.episode_ms is not None
    return case.recipe.learning.rollout.envs_per_slot * case.episode_ms / 1000.0


def overheads(cases: Sequence[Case], cells: Sequence[Cell]) -> list[Overhead]:
    """Of every fleet that slept often enough to tell what a task costs from what an iteration does.

    That takes rows with different numbers of tasks in a row, and one row more than two.
    """
    known = {case.name: case for case in cases if case.episode_ms is not None}
    found = []
    for fleet in dict.fromkeys(cell.fleet for cell in cells):
        mine = [cell for cell in cells if cell.fleet == fleet and cell.case in known]
        points = [_lost(known[cell.case], cell) for cell in mine]
        if len(points) >= _FEWEST_ROWS and len({turns for turns, _ in points}) > 1:
            task_s, iteration_s, clamped = _fit(np.array(points, np.float64))
            misses_s = max(abs(lost - iteration_s - turns * task_s) for turns, lost in points)
            found.append(Overhead(fleet, task_s, iteration_s, len(points), clamped, misses_s))
    return found


def _lost(case: Case, cell: Cell) -> tuple[float, float]:
    """An iteration's tasks in a row, and its seconds that were neither work nor learning."""
    spent = median(one.seconds - one.learn_s for one in cell.repetitions) / case.iterations
    turns = _turns(case, cell)
    return turns, spent - turns * _task_s(case)


def _fit(points: Float64) -> tuple[float, float, bool]:
    """Seconds a task and seconds an iteration, neither below 0, and whether one would have been."""
    turns, lost = points[:, 0], points[:, 1]
    (slope, level), *_ = np.linalg.lstsq(np.stack([turns, np.ones_like(turns)], 1), lost)
    if slope < 0.0:
        return 0.0, max(0.0, float(lost.mean())), True
    if level < 0.0:
        return max(0.0, float((turns @ lost) / (turns @ turns))), 0.0, True
    return float(slope), float(level), False


def break_even_s(
    here: Overhead, there: Overhead, workers: tuple[int, int], episodes: int
) -> Interval | None:
    """Seconds an episode from which `there` is the faster; None where it never is.

    Between as little and as much as rows allow that lie from their lines as far as the farthest.
    """
    few, many = (ceil(episodes / count) for count in workers)
    if many >= few:
        return None
    more = (there.iteration_s + many * there.task_s) - (here.iteration_s + few * here.task_s)
    missed = here.misses_s + there.misses_s
    low, value, high = (
        max(0.0, lost / (few - many)) for lost in (more - missed, more, more + missed)
    )
    return Interval(value, low, high)


def gains(cells: Sequence[Cell], here: str = "local", there: str = "flame") -> list[Gain]:
    """Wherever both were measured with as many workers."""
    mine = {(c.case, c.workers): c for c in cells if c.fleet == here}
    return [
        Gain(
            cell.case,
            cell.workers,
            (median(other.seconds), median(cell.seconds)),
            compare_medians(seconds_of(other), seconds_of(cell)),
        )
        for cell in cells
        if cell.fleet == there and (other := mine.get((cell.case, cell.workers)))
    ]


def same_bits(cells: Sequence[Cell], case: str) -> bool | None:
    """Whether every fleet and every repetition of a case learned the same weights."""
    return agreed(one.weights for c in cells if c.case == case for one in c.repetitions)


def agreed(digests: Iterable[str]) -> bool | None:
    """Whether all are one; None where there are no two to compare."""
    found = [*digests]
    return None if len(found) < 2 else len(set(found)) == 1
