"""From runs to the lines of a chart: which metric, over what, smoothed, seeds taken together.

Must not know: how a chart is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlflame.errors import CheckpointError, ConfigError
from rlflame.estimates import iqm_band
from rlflame.grouping import Group, groups
from rlflame.metrics import NAMES
from rlflame.plot import Chart, Panels, Series
from rlflame.recorded import Recorded
from rlflame.rollout.spec import Float64

#: What a curve can be drawn over, and how the axis is called.
AXES = {
    "steps": "Environment steps",
    "total-steps": "Environment steps",
    "wall": "Wall clock",
    "cpu": "Processor time, workers included",
    "episodes": "Training episodes",
}
_STEPS_OF = {"steps": " per learner", "total-steps": ", all learners together"}
#: Every training episode by itself, from episodes.csv.
EPISODE_RETURN = "episode_return"
TRAINING_RETURN = "episode_return_mean"
EVALUATION = "eval_return_mean"
#: Evaluations that make a curve.
FEWEST_EVALUATIONS = 3
WINDOW_EPISODES = 50
_WORDS = {
    EPISODE_RETURN: "Return",
    TRAINING_RETURN: "Training return",
    EVALUATION: "Evaluation return",
}
LINE_NOTE = "Line: interquartile mean over seeds."
_UNITS = ((2.0 * 3600.0, 3600.0, "h"), (180.0, 60.0, "min"), (0.0, 1.0, "s"))
#: Points of the grid on which seeds are taken together.
_POINTS = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's values; with `low` and `high` where each value has an interval of its own."""

    x: Float64
    y: Float64
    low: Float64 | None = None
    high: Float64 | None = None


def picture(
    runs: Sequence[Recorded], axis: str | None = None, metric: str | None = None, smooth: int = 1
) -> Chart | Panels:
    """A chart; of several environments one for each, for their returns have no scale in common."""
    metric = metric or sensible_metric(runs, axis)
    environments = dict.fromkeys(run.environment for run in runs)
    if len(environments) == 1:
        return chart(runs, axis, metric, smooth)
    charts, found = [], []
    for environment in environments:
        alike = [run for run in runs if run.environment == environment]
        panel = chart(alike, axis, metric, smooth)
        charts.append(replace(panel, title=environment, line_note="", band_note=""))
        found += groups(alike)
    return Panels(tuple(charts), _line_note(found), _band_note(found, metric, smooth))


def chart(
    runs: Sequence[Recorded], axis: str | None = None, metric: str | None = None, smooth: int = 1
) -> Chart:
    """Of one environment: a line for each group of runs that differ in the seed alone."""
    metric = metric or sensible_metric(runs, axis)
    axis = axis or ("episodes" if metric == EPISODE_RETURN else "steps")
    _check(axis, metric, smooth)
    found = groups(runs)
    if metric == EPISODE_RETURN:
        window = smooth if smooth > 1 else WINDOW_EPISODES
        series = [_scattered(group, axis, window) for group in found]
    else:
        series = [_line(group, axis, metric, smooth) for group in found]
    series, axis_label = _with_units(series, axis, runs)
    smoothed = f", mean of {smooth}" if smooth > 1 and metric != EPISODE_RETURN else ""
    return Chart(
        title=_title(found),
        x_label=axis_label,
        y_label=_WORDS.get(metric, metric) + smoothed,
        series=tuple(series),
        line_note=_line_note(found),
        band_note=_band_note(found, metric, smooth),
    )


def sensible_metric(runs: Sequence[Recorded], axis: str | None = None) -> str:
    """Evaluations where they make a curve; else what was seen in training."""
    if axis != "episodes" and all(
        len(run.values(EVALUATION)[0]) >= FEWEST_EVALUATIONS for run in runs
    ):
        return EVALUATION
    if all(run.algorithm == "reinforce" for run in runs):
        return EPISODE_RETURN
    return TRAINING_RETURN


def _check(axis: str, metric: str, smooth: int) -> None:
    if axis not in AXES:
        raise ConfigError(f"There is no x axis {axis!r}.", f"-x {', '.join(AXES)}")
    if metric != EPISODE_RETURN and metric not in NAMES:
        raise ConfigError(
            f"There is no metric {metric!r}.", f"--metric {EPISODE_RETURN}, {', '.join(NAMES)}"
        )
    if smooth < 1:
        raise ConfigError(f"--smooth is {smooth}.", "--smooth 5, the number of points to average")


def _line(group: Group, axis: str, metric: str, smooth: int) -> Series:
    curves = []
    for run in group.runs:
        steps, values = run.values(metric)
        if not len(steps):
            raise CheckpointError(
                f"{run.folder} has no {metric} yet.", "--metric NAME draws another"
            )
        low = high = None
        if metric == EVALUATION and smooth == 1:
            ends = [run.values(name)[1] for name in ("eval_return_low", "eval_return_high")]
            low, high = ends if all(len(end) == len(steps) for end in ends) else (None, None)
        curves.append(Curve(positions(run, steps, axis), smoothed(values, smooth), low, high))
    return _together(group.label, curves)


def _scattered(group: Group, axis: str, window: int) -> Series:
    """Every episode as a dot, and their moving average."""
    dots, averages = [], []
    for run in group.runs:
        returns, lengths = run.episodes()
        if not len(returns):
            raise CheckpointError(
                f"{run.folder} has finished no episode yet.", "try again when it has"
            )
        x = episode_positions(run, lengths, axis)
        dots.append((x, returns))
        averages.append(Curve(x[window - 1 :], moving_average(returns, window)))
    long_enough = [curve for curve in averages if len(curve.x)]
    together = (
        _together(group.label, long_enough)
        if len(long_enough) == len(averages)
        else Series(group.label, np.zeros(0), np.zeros(0))
    )
    return Series(
        group.label,
        together.x,
        together.y,
        together.low,
        together.high,
        dots=(np.concatenate([x for x, _ in dots]), np.concatenate([y for _, y in dots])),
        average_of=window,
    )


def positions(run: Recorded, steps: Float64, axis: str) -> Float64:
    """Where on an axis a run stood after so many steps."""
    if axis == "steps":
        return steps / _learners(run)
    if axis == "total-steps":
        return steps
    if axis == "episodes":
        at, episodes = run.values("episodes")
        return _interpolated(steps, np.append(0.0, at), np.append(0.0, episodes))
    clock = run.clock("wall_s") if axis == "wall" else _processor(run)
    if clock is None:
        what = "wall clock" if axis == "wall" else "workers' processor time"
        raise CheckpointError(
            f"{run.folder} has no record of its {what}.", "-x steps draws it over steps"
        )
    at, seconds = clock
    return _interpolated(steps, np.append(0.0, at), np.append(0.0, seconds))


def episode_positions(run: Recorded, lengths: Float64, axis: str) -> Float64:
    """Where each episode ended."""
    if axis == "episodes":
        return np.arange(1.0, len(lengths) + 1.0)
    return positions(run, np.cumsum(lengths), axis)


def _interpolated(at: Float64, x: Float64, y: Float64) -> Float64:
    values: Float64 = np.interp(at, x, y)
    return values


def _learners(run: Recorded) -> int:
    """How many learned together; a run that does not say had one."""
    return int(run.runtime.get("learners") or 1)


def smoothed(values: Float64, window: int) -> Float64:
    """Each value with those before it, up to `window` in all; the first ones with fewer."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    means: Float64 = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def moving_average(values: Float64, window: int) -> Float64:
    """Element i is the mean of `window` values, the last of them values[i + window - 1]."""
    if len(values) < window:
        return np.zeros(0)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    averages: Float64 = (sums[window:] - sums[:-window]) / window
    return averages


def common_grid(xs: Sequence[Float64]) -> Float64:
    """Where all of them have values: their own points if those are few, else evenly spread."""
    first, last = max(x[0] for x in xs), min(x[-1] for x in xs)
    if first > last:
        return np.zeros(0)
    own: Float64 = np.unique(np.concatenate(xs))
    own = own[(own >= first) & (own <= last)]
    if len(own) <= _POINTS:
        return own
    return np.linspace(first, last, _POINTS)


def _together(label: str, curves: Sequence[Curve]) -> Series:
    """A single run as it is; several as their interquartile mean and its interval."""
    if len(curves) == 1:
        (only,) = curves
        return Series(label, only.x, only.y, only.low, only.high)
    grid = common_grid([curve.x for curve in curves])
    if not len(grid):
        raise CheckpointError(
            f"The runs of {label} have no stretch of the axis in common.",
            "another axis, such as -x steps, or fewer runs",
        )
    values = np.stack([_interpolated(grid, curve.x, curve.y) for curve in curves])
    return Series(label, grid, *iqm_band(values))


def _processor(run: Recorded) -> tuple[Float64, Float64] | None:
    """Executors of a cluster do not tell what they spent; a run in one process has no workers."""
    fleets = {machine.get("fleet") for machine in run.machines}
    if fleets == {"inline"}:
        return run.clock("driver_cpu_s")
    if not fleets or "flame" in fleets:
        return None
    return run.clock("driver_cpu_s", "workers_cpu_s")


def _with_units(
    series: Sequence[Series], axis: str, runs: Sequence[Recorded]
) -> tuple[list[Series], str]:
    label = AXES[axis]
    if axis in ("steps", "total-steps"):
        several = any(_learners(run) > 1 for run in runs)
        return list(series), f"{label}{_STEPS_OF[axis] if several else ''}"
    if axis not in ("wall", "cpu"):
        return list(series), label
    longest = max(float(line.all_x().max(initial=0.0)) for line in series)
    divisor, unit = next((unit, name) for least, unit, name in _UNITS if longest >= least)
    return [line.over(divisor) for line in series], f"{label} ({unit})"


def _title(found: Sequence[Group]) -> str:
    environment = found[0].environment
    return f"{environment}: {found[0].label}" if len(found) == 1 else environment


def _line_note(found: Sequence[Group]) -> str:
    return LINE_NOTE if any(len(group.runs) > 1 for group in found) else ""


def _band_note(found: Sequence[Group], metric: str, smooth: int) -> str:
    notes = []
    if any(len(group.runs) > 1 for group in found):
        notes.append("over seeds")
    if metric == EVALUATION and smooth == 1 and any(len(group.runs) == 1 for group in found):
        notes.append("of a single run over its evaluation episodes")
    return f"Band: 95% bootstrap interval {', or '.join(notes)}." if notes else ""
