"""Makes charts of runs: chooses the metric and axis, smooths and averages curves."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlflame.analysis.grouping import group_runs, split_group
from rlflame.analysis.plots.chart import Chart, Panels, Series
from rlflame.errors import CheckpointError, ConfigError
from rlflame.fleet.factory import has_workers, is_remote
from rlflame.rollout.task import Float64
from rlflame.statistics import compute_iqm_band
from rlflame.storage.metrics import NAMES
from rlflame.storage.run_reader import RunData

#: The x axes of a chart and their labels.
AXES = {
    "steps": "Environment steps",
    "total-steps": "Environment steps",
    "wall": "Wall-clock time",
    "cpu": "Processor time, workers included",
    "episodes": "Training episodes",
}
_STEPS_OF = {"steps": " per learner", "total-steps": ", all learners together"}
#: The return of each training episode, from episodes.csv.
EPISODE_RETURN = "episode_return"
TRAINING_RETURN = "episode_return_mean"
EVALUATION = "eval_return_mean"
#: The minimum number of evaluations that are drawn as a curve by default.
FEWEST_EVALUATIONS = 3
WINDOW_EPISODES = 50
_METRIC_LABELS = {
    EPISODE_RETURN: "Return",
    TRAINING_RETURN: "Training return",
    EVALUATION: "Evaluation return",
}
LINE_NOTE = "Line: interquartile mean over seeds."
_BAND_NOTE = (
    "Band (images only): 95% bootstrap interval over seeds, or over the evaluation episodes of a "
    "single run."
)
_UNITS = ((2.0 * 3600.0, 3600.0, "h"), (180.0, 60.0, "min"), (0.0, 1.0, "s"))
#: The maximum number of grid points at which seeds are averaged.
_GRID_POINTS = 200


def make_figure(
    runs: Sequence[RunData], axis: str | None = None, metric: str | None = None, smooth: int = 1
) -> Chart | Panels:
    """Return a chart for one environment, or a panel for each if there are several.

    Each environment has a separate panel, because returns differ in scale. The notes list the runs
    that cannot be drawn. If no run can be drawn, the first error is raised.
    """
    metric = metric or choose_metric(runs, axis)
    environments = dict.fromkeys(run.environment for run in runs)
    if len(environments) == 1:
        return make_chart(runs, axis, metric, smooth)
    charts, errors = list[Chart](), list[CheckpointError]()
    for environment in environments:
        group = [run for run in runs if run.environment == environment]
        try:
            chart = make_chart(group, axis, metric, smooth)
            charts.append(replace(chart, title=environment))
        except CheckpointError as error:
            errors.append(error)
    if not charts:
        raise errors[0]
    notes = [note for chart in charts for note in chart.notes]
    notes += [f"{error.message} This run is skipped." for error in errors]
    return Panels(tuple(charts), tuple(dict.fromkeys(notes)))


def make_chart(
    runs: Sequence[RunData], axis: str | None = None, metric: str | None = None, smooth: int = 1
) -> Chart:
    """Return a chart of one environment, with one line per recipe."""
    metric = metric or choose_metric(runs, axis)
    axis = axis or ("episodes" if metric == EPISODE_RETURN else "steps")
    _check_arguments(axis, metric, smooth)
    curves: dict[Path, Series] = {}
    errors: list[CheckpointError] = []
    for run in runs:
        try:
            curves[run.folder] = _make_curve(run, axis, metric, smooth)
        except CheckpointError as error:
            errors.append(error)
    if not curves:
        raise errors[0]
    lines, notes = list[Series](), list[str]()
    for group in group_runs([run for run in runs if run.folder in curves]):
        group_curves = [curves[run.folder] for run in group.runs]
        if len(group_curves) > 1 and (line := make_mean_series(group.label, group_curves)):
            lines.append(line)
            notes = [LINE_NOTE]
            continue
        # Runs that do not overlap on the axis are drawn separately.
        for single, curve in zip(split_group(group), group_curves, strict=True):
            lines.append(replace(curve, label=single.label))
    if any(line.low is not None for line in lines):
        notes.append(_BAND_NOTE)
    series, axis_label = _apply_units(lines, axis, runs)
    y_label = _METRIC_LABELS.get(metric, metric)
    if smooth > 1 and metric != EPISODE_RETURN:
        y_label += f", mean of {smooth}"
    title = runs[0].environment + (f": {lines[0].label}" if len(lines) == 1 else "")
    notes += [f"{error.message} This run is skipped." for error in errors]
    return Chart(title, axis_label, y_label, tuple(series), tuple(notes))


def choose_metric(runs: Sequence[RunData], axis: str | None = None) -> str:
    """Choose evaluation returns if every run has enough, and training returns if not."""
    if axis != "episodes" and all(
        len(run.read_values(EVALUATION)[0]) >= FEWEST_EVALUATIONS for run in runs
    ):
        return EVALUATION
    if all(run.counts_iterations for run in runs):
        return EPISODE_RETURN
    return TRAINING_RETURN


def _check_arguments(axis: str, metric: str, smooth: int) -> None:
    if axis not in AXES:
        raise ConfigError(f"There is no x axis {axis!r}.", f"-x {', '.join(AXES)}")
    metrics = [EPISODE_RETURN, *NAMES]
    if metric not in metrics:
        close = difflib.get_close_matches(metric, metrics, n=3, cutoff=0.5) or metrics
        raise ConfigError(f"There is no metric {metric!r}.", f"--metric {', '.join(close)}")
    if smooth < 1:
        raise ConfigError(f"--smooth is {smooth}, but must be at least 1.", "--smooth 5")


def _make_curve(run: RunData, axis: str, metric: str, smooth: int) -> Series:
    """Return the curve of one run, with a band if its evaluations have intervals."""
    if metric == EPISODE_RETURN:
        return _make_episode_curve(run, axis, smooth if smooth > 1 else WINDOW_EPISODES)
    steps, values = run.read_values(metric)
    if not len(steps):
        raise CheckpointError(f"{run.folder} has no {metric} yet.", "choose another with --metric")
    line = Series("", compute_positions(run, steps, axis), smooth_values(values, smooth))
    ends = [run.read_values(name)[1] for name in ("eval_return_low", "eval_return_high")]
    if metric == EVALUATION and smooth == 1 and all(len(end) == len(steps) for end in ends):
        line = replace(line, low=ends[0], high=ends[1])
    return line


def _make_episode_curve(run: RunData, axis: str, window: int) -> Series:
    """Return a dot for each episode, and the moving average of the dots as a line."""
    returns, lengths = run.read_episodes()
    if not len(returns):
        raise CheckpointError(f"{run.folder} has not finished an episode yet.", "try again later")
    # An episode is drawn at the position where it ends.
    episodes = np.arange(1.0, len(lengths) + 1.0)
    x = episodes if axis == "episodes" else compute_positions(run, np.cumsum(lengths), axis)
    if len(returns) < window:  # too few episodes for a line
        return Series("", x[:0], returns[:0], dots=(x, returns), average_of=window)
    return Series("", x, smooth_values(returns, window), dots=(x, returns), average_of=window)


def compute_positions(run: RunData, steps: Float64, axis: str) -> Float64:
    """Convert numbers of environment steps to positions on the x axis."""
    if axis == "steps":
        return steps / _count_learners(run)
    if axis == "total-steps":
        return steps
    if axis == "episodes":
        clock: tuple[Float64, Float64] | None = run.read_values("episodes")
    else:
        clock = run.compute_elapsed_s("wall_s") if axis == "wall" else _read_cpu_s(run)
    if clock is None:
        quantity = "wall-clock time" if axis == "wall" else "workers' processor time"
        raise CheckpointError(f"{run.folder} has no record of its {quantity}.", "use -x steps")
    at, values = clock
    positions: Float64 = np.interp(steps, np.append(0.0, at), np.append(0.0, values))
    return positions


def _count_learners(run: RunData) -> int:
    """Return the number of learners of a run, or 1 if it is not recorded."""
    return run.get_runtime_count("learners") or 1


def _read_cpu_s(run: RunData) -> tuple[Float64, Float64] | None:
    """Return the CPU time of the driver and workers; None if unknown, as on Flame."""
    fleets = {machine.get("fleet") for machine in run.machines}
    if not fleets or any(map(is_remote, fleets)):
        return None
    workers = ("workers_cpu_s",) if any(map(has_workers, fleets)) else ()
    return run.compute_elapsed_s("driver_cpu_s", *workers)


def _apply_units(
    series: Sequence[Series], axis: str, runs: Sequence[RunData]
) -> tuple[Sequence[Series], str]:
    label = AXES[axis]
    if axis in _STEPS_OF:
        has_several = any(_count_learners(run) > 1 for run in runs)
        return series, f"{label}{_STEPS_OF[axis] if has_several else ''}"
    if axis == "episodes":
        return series, label
    longest = max(float(line.collect_x().max(initial=0.0)) for line in series)
    divisor, unit = next((unit, name) for minimum, unit, name in _UNITS if longest >= minimum)
    return [line.scale_x(divisor) for line in series], f"{label} ({unit})"


def smooth_values(values: Float64, window: int) -> Float64:
    """Return the means of `window` values around each value.

    Beyond both ends, the first and the last value are repeated.
    """
    values = np.pad(values, (window // 2, (window - 1) // 2), mode="edge")
    sums = np.concatenate(([0.0], np.cumsum(values)))
    means: Float64 = (sums[window:] - sums[:-window]) / window
    return means


def make_common_grid(xs: Sequence[Float64]) -> Float64:
    """Return x values that all curves cover: their own, or a grid if there are many."""
    first, last = max(x[0] for x in xs), min(x[-1] for x in xs)
    points: Float64 = np.unique(np.concatenate(xs))
    points = points[(points >= first) & (points <= last)]
    return points if len(points) <= _GRID_POINTS else np.linspace(first, last, _GRID_POINTS)


def make_mean_series(label: str, curves: Sequence[Series]) -> Series | None:
    """Aggregate runs into their interquartile mean and its confidence interval.

    Return None if the runs do not overlap on the axis.
    """
    xs, average_of = [curve.x for curve in curves], curves[0].average_of
    parts = [curve.dots for curve in curves if curve.dots is not None]
    dots = None
    if parts:
        dots = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    if not all(map(len, xs)):  # a run has too few episodes for a moving average
        return Series(label, np.zeros(0), np.zeros(0), dots=dots, average_of=average_of)
    grid = make_common_grid(xs)
    if not len(grid) or (len(grid) == 1 and max(map(len, xs)) > 1):
        return None
    values = np.stack([np.interp(grid, curve.x, curve.y) for curve in curves])
    return Series(label, grid, *compute_iqm_band(values), dots, average_of)
