"""What to do with it: the sentences at the end of a scaling benchmark.

Must not know: how it was timed, how it is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rlflame.bench.base import Case, Cell
from rlflame.bench.scaling_model import (
    FleetOverhead,
    ScalingRow,
    compute_break_even_s,
    make_seconds_array,
)
from rlflame.statistics import FEWEST_SEEDS, Interval, compare_medians

#: The iteration that break-even times are said for, as in what others publish.
EPISODES = 100
_POOR = 0.6
#: Of an iteration, lost between driver and workers.
_MUCH = 0.25
_FEW_TURNS = 4


def make_sentences(
    cases: Sequence[Case],
    rows: Sequence[ScalingRow],
    overheads: Sequence[FleetOverhead],
    usable_cores: int,
) -> list[str]:
    """What was seen first, then what to type."""
    cells = [row.cell for row in rows]
    lines = [
        *_format_fastest(cases, cells),
        *_format_break_even(cases, cells, overheads, usable_cores),
    ]
    return lines + _format_scaling_advice(cases, rows)


def _format_fastest(cases: Sequence[Case], cells: Sequence[Cell]) -> list[str]:
    """The winner of each case, where fleets compete."""
    won: dict[str, list[str]] = {"flame": [], "local": [], "": []}
    for case in cases:
        best = {
            fleet: min(candidates, key=lambda cell: median(cell.seconds))
            for fleet in ("local", "flame")
            if (candidates := [c for c in cells if c.case == case.name and c.fleet == fleet])
        }
        if len(best) < 2:
            continue
        if min(len(cell.repetitions) for cell in best.values()) < FEWEST_SEEDS:
            won[""].append(case.name)
            continue
        change = compare_medians(
            make_seconds_array(best["local"]), make_seconds_array(best["flame"])
        )
        winner = "flame" if change.low > 0.0 else "local" if change.high < 0.0 else ""
        won[winner].append(case.name)
    lines = []
    if won["flame"]:
        lines.append(f"Flame was faster for {', '.join(won['flame'])}: --fleet flame.")
    if won["local"]:
        lines.append(f"This machine was faster for {', '.join(won['local'])}: --local.")
    if won[""]:
        lines.append(
            f"No difference was shown for {', '.join(won[''])}: --local needs no cluster, and "
            f"--repeat tells them apart, {FEWEST_SEEDS} or more."
        )
    return lines


def _format_break_even(
    cases: Sequence[Case],
    cells: Sequence[Cell],
    overheads: Sequence[FleetOverhead],
    usable_cores: int,
) -> list[str]:
    """Episode times from which executors pay, beside one worker and beside all cores here."""
    overhead_by_fleet = {overhead.fleet: overhead for overhead in overheads}
    if not {"local", "flame"} <= overhead_by_fleet.keys():
        return []
    sleeping = {case.name for case in cases if case.episode_ms is not None}
    slept = [cell for cell in cells if cell.fleet in overhead_by_fleet and cell.case in sleeping]
    if overhead_by_fleet["flame"].clamped or min(len(c.repetitions) for c in slept) < FEWEST_SEEDS:
        return [
            "What a task costs on Flame is lost in what differs from one time to the next, so it "
            f"is not said from when executors pay: --repeat {FEWEST_SEEDS} or more, or more of "
            "--episode-ms."
        ]
    executors = max(cell.workers for cell in cells if cell.fleet == "flame")
    lines = []
    for workers in dict.fromkeys((1, usable_cores)):
        seconds = compute_break_even_s(
            overhead_by_fleet["local"], overhead_by_fleet["flame"], (workers, executors), EPISODES
        )
        counterpart = f"{workers} worker{'s' * (workers > 1)} here"
        executors_text = f"{executors} executor{'s' * (executors > 1)}"
        if seconds is None:
            lines.append(
                f"{executors_text.capitalize()} cannot win against {counterpart}: Flame pays "
                "with more executors "
                f"than that."
            )
        else:
            lines.append(
                f"With {EPISODES} episodes an iteration {executors_text} "
                f"win{'s' * (executors == 1)} against "
                f"{counterpart} from {_format_threshold(seconds)}."
            )
    return lines


def _format_threshold(seconds: Interval) -> str:
    """With how far it may lie from there, where that can be seen in what is said."""
    value, low, high = (
        f"{1000.0 * bound_s:.3g}" for bound_s in (seconds.value, seconds.low, seconds.high)
    )
    text = f"{value} ms an episode on"
    if low == value == high:
        return text
    return f"{text}; rows lie so far beside the line that it may be any length from {low} to {high}"


def _format_scaling_advice(cases: Sequence[Case], rows: Sequence[ScalingRow]) -> list[str]:
    """What keeps the widest from their theoretical speed-up, and what helps."""
    tasks = {case.name: case.tasks for case in cases}
    most = max(row.cell.workers for row in rows)
    if most == min(row.cell.workers for row in rows):
        is_inline = all(row.cell.fleet == "inline" for row in rows)
        subject = "This process is one worker, which" if is_inline else "One number of workers"
        how = f"{'--compare local ' if is_inline else ''}--workers 1,2"
        return [f"{subject} does not say how work is shared: {how}."]
    widest = [row for row in rows if row.cell.workers == most]
    poor = [row for row in widest if row.efficiency < _POOR]
    waiting = [row for row in widest if row not in poor and (row.lost or 0.0) > _MUCH]
    if not poor and not waiting:
        least = min(row.efficiency for row in widest)
        return [f"{most} workers do at least {least:.0%} of what they could."]
    few = [row for row in poor if tasks[row.cell.case] < _FEW_TURNS * most]
    learning = [row for row in poor if row.learning > 0.3]
    short = [row for row in poor if row not in learning]
    lines = []
    if waiting:
        lines.append(
            f"Of {_format_rows(waiting)} up to {max(row.lost or 0.0 for row in waiting):.0%} is "
            "latency "
            "and dispatch: an environment whose episodes take "
            "longer, or several in a task (rollout.envs_per_slot)."
        )
    if learning:
        lines.append(
            f"Learning takes {max(row.learning for row in learning):.0%} of "
            f"{_format_rows(learning)}, and workers do not shorten it: --set rollout.staleness=1 "
            "overlaps it where the algorithm allows."
        )
    if short:
        lines.append(
            f"More workers gain little for {_format_rows(short)}: an environment whose episodes "
            "take "
            "longer, or fewer workers."
        )
    if few:
        lines.append(
            f"{_format_rows(few).capitalize()} had fewer than {_FEW_TURNS} tasks for each "
            "worker: more "
            "episodes an iteration (100 or more on a cluster) share what an iteration costs."
        )
    return lines


def _format_rows(rows: Sequence[ScalingRow]) -> str:
    return ", ".join(dict.fromkeys(f"{row.cell.case} on {row.cell.fleet}" for row in rows))
