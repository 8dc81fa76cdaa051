"""What to do with it: the sentences at the end of a scaling benchmark.

Must not know: how it was timed, how it is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rlflame.bench.base import Case, Cell
from rlflame.bench.scaling_model import Overhead, Row, break_even_s, seconds_of
from rlflame.statistics import FEWEST_SEEDS, Interval, compare_medians

#: The iteration that break-even times are said for, as in what others publish.
EPISODES = 100
_POOR = 0.6
#: Of an iteration, lost between driver and workers.
_MUCH = 0.25
_FEW_TURNS = 4


def sentences(
    cases: Sequence[Case],
    rows: Sequence[Row],
    overheads: Sequence[Overhead],
    usable_cores: int,
) -> list[str]:
    """What was seen first, then what to type."""
    cells = [row.cell for row in rows]
    said = [*_fastest(cases, cells), *_break_even(cases, cells, overheads, usable_cores)]
    return said + _more(cases, rows)


def _fastest(cases: Sequence[Case], cells: Sequence[Cell]) -> list[str]:
    """The winner of each case, where fleets compete."""
    won: dict[str, list[str]] = {"flame": [], "local": [], "": []}
    for case in cases:
        best = {
            fleet: min(found, key=lambda cell: median(cell.seconds))
            for fleet in ("local", "flame")
            if (found := [c for c in cells if c.case == case.name and c.fleet == fleet])
        }
        if len(best) < 2:
            continue
        if min(len(cell.repetitions) for cell in best.values()) < FEWEST_SEEDS:
            won[""].append(case.name)
            continue
        change = compare_medians(seconds_of(best["local"]), seconds_of(best["flame"]))
        winner = "flame" if change.low > 0.0 else "local" if change.high < 0.0 else ""
        won[winner].append(case.name)
    said = []
    if won["flame"]:
        said.append(f"Flame was faster for {', '.join(won['flame'])}: --fleet flame.")
    if won["local"]:
        said.append(f"This machine was faster for {', '.join(won['local'])}: --local.")
    if won[""]:
        said.append(
            f"No difference was shown for {', '.join(won[''])}: --local needs no cluster, and "
            f"--repeat tells them apart, {FEWEST_SEEDS} or more."
        )
    return said


def _break_even(
    cases: Sequence[Case],
    cells: Sequence[Cell],
    overheads: Sequence[Overhead],
    usable_cores: int,
) -> list[str]:
    """Episode times from which executors pay, beside one worker and beside all cores here."""
    known = {one.fleet: one for one in overheads}
    if not {"local", "flame"} <= known.keys():
        return []
    sleeping = {case.name for case in cases if case.episode_ms is not None}
    slept = [cell for cell in cells if cell.fleet in known and cell.case in sleeping]
    if known["flame"].clamped or min(len(c.repetitions) for c in slept) < FEWEST_SEEDS:
        return [
            "What a task costs on Flame is lost in what differs from one time to the next, so it "
            f"is not said from when executors pay: --repeat {FEWEST_SEEDS} or more, or more of "
            "--episode-ms."
        ]
    executors = max(cell.workers for cell in cells if cell.fleet == "flame")
    said = []
    for workers in dict.fromkeys((1, usable_cores)):
        seconds = break_even_s(known["local"], known["flame"], (workers, executors), EPISODES)
        beside = f"{workers} worker{'s' * (workers > 1)} here"
        who = f"{executors} executor{'s' * (executors > 1)}"
        if seconds is None:
            said.append(
                f"{who.capitalize()} cannot win against {beside}: Flame pays with more executors "
                f"than that."
            )
        else:
            said.append(
                f"With {EPISODES} episodes an iteration {who} win{'s' * (executors == 1)} against "
                f"{beside} from {_from(seconds)}."
            )
    return said


def _from(seconds: Interval) -> str:
    """With how far it may lie from there, where that can be seen in what is said."""
    value, low, high = (f"{1000.0 * one:.3g}" for one in (seconds.value, seconds.low, seconds.high))
    said = f"{value} ms an episode on"
    if low == value == high:
        return said
    return f"{said}; rows lie so far beside the line that it may be any length from {low} to {high}"


def _more(cases: Sequence[Case], rows: Sequence[Row]) -> list[str]:
    """What keeps the widest from their theoretical speed-up, and what helps."""
    tasks = {case.name: case.tasks for case in cases}
    most = max(row.cell.workers for row in rows)
    if most == min(row.cell.workers for row in rows):
        alone = all(row.cell.fleet == "inline" for row in rows)
        here = "This process is one worker, which" if alone else "One number of workers"
        how = f"{'--compare local ' if alone else ''}--workers 1,2"
        return [f"{here} does not say how work is shared: {how}."]
    widest = [row for row in rows if row.cell.workers == most]
    poor = [row for row in widest if row.efficiency < _POOR]
    waiting = [row for row in widest if row not in poor and (row.lost or 0.0) > _MUCH]
    if not poor and not waiting:
        least = min(row.efficiency for row in widest)
        return [f"{most} workers do at least {least:.0%} of what they could."]
    few = [row for row in poor if tasks[row.cell.case] < _FEW_TURNS * most]
    learning = [row for row in poor if row.learning > 0.3]
    short = [row for row in poor if row not in learning]
    said = []
    if waiting:
        said.append(
            f"Of {_named(waiting)} up to {max(row.lost or 0.0 for row in waiting):.0%} is latency "
            "and dispatch: an environment whose episodes take "
            "longer, or several in a task (rollout.envs_per_slot)."
        )
    if learning:
        said.append(
            f"Learning takes {max(row.learning for row in learning):.0%} of "
            f"{_named(learning)}, and workers do not shorten it: --set rollout.staleness=1 "
            "overlaps it where the algorithm allows."
        )
    if short:
        said.append(
            f"More workers gain little for {_named(short)}: an environment whose episodes take "
            "longer, or fewer workers."
        )
    if few:
        said.append(
            f"{_named(few).capitalize()} had fewer than {_FEW_TURNS} tasks for each worker: more "
            "episodes an iteration (100 or more on a cluster) share what an iteration costs."
        )
    return said


def _named(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(f"{row.cell.case} on {row.cell.fleet}" for row in rows))
