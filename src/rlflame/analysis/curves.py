"""From runs to the lines of a chart: which metric, over what, smoothed, seeds taken together."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlflame.analysis.grouping import RunGroup, group_runs, split_group
from rlflame.analysis.plots.chart import Chart, Panels, Series
from rlflame.errors import CheckpointError, ConfigError
from rlflame.fleet.factory import is_remote
from rlflame.rollout.task import Float64
from rlflame.statistics import compute_iqm_band
from rlflame.storage.metrics import NAMES
from rlflame.storage.run_reader import RunData

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
_METRIC_LABELS = {
    EPISODE_RETURN: "Return",
    TRAINING_RETURN: "Training return",
    EVALUATION: "Evaluation return",
}
LINE_NOTE = "Line: interquartile mean over seeds."
_UNITS = ((2.0 * 3600.0, 3600.0, "h"), (180.0, 60.0, "min"), (0.0, 1.0, "s"))
#: A line that shows less of the longest of its runs says so.
_SHARE_WITHOUT_REMARK = 0.5
#: Points of the grid on which seeds are taken together.
_GRID_POINTS = 200


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's values, with `low` and `high` where each value has an interval."""

    x: Float64
    y: Float64
    low: Float64 | None = None
    high: Float64 | None = None
    #: What the values were averaged from, where that is drawn too.
    dots: tuple[Float64, Float64] | None = None


def make_figure(
    runs: Sequence[RunData], axis: str | None = None, metric: str | None = None, smooth: int = 1
) -> Chart | Panels:
    """A chart; of several environments one for each, for their returns have no scale in common.

    What cannot be drawn is left out with a remark, as long as there is something that can.
    """
    metric = metric or choose_metric(runs, axis)
    environments = dict.fromkeys(run.environment for run in runs)
    if len(environments) == 1:
        return make_chart(runs, axis, metric, smooth)
    charts, panels, remarks = [], [], _Remarks()
    for environment in environments:
        alike = [run for run in runs if run.environment == environment]
        with remarks.skip_errors():
            chart = make_chart(alike, axis, metric, smooth)
            charts.append(chart)
            panels.append(replace(chart, title=environment, line_note="", band_note="", remark=""))
            remarks.add(f"{environment}: {chart.remark}" if chart.remark else "")
    remarks.require_any(charts)
    line_note = " ".join(filter(None, dict.fromkeys(chart.line_note for chart in charts)))
    band_note = " ".join(filter(None, dict.fromkeys(chart.band_note for chart in charts)))
    return Panels(tuple(panels), line_note, band_note, str(remarks))


class _Remarks:
    """What is not drawn, or not as usual; an error where nothing is."""

    def __init__(self) -> None:
        self._remarks: list[str] = []
        self._errors: list[CheckpointError] = []

    @contextlib.contextmanager
    def skip_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._errors.append(error)
            self.add(f"{error.message} It is left out.")

    def add(self, remark: str) -> None:
        self._remarks += [remark] if remark else []

    def require_any(self, results: Collection[object]) -> None:
        if not results and self._errors:
            raise self._errors[0]

    def __str__(self) -> str:
        return " ".join(self._remarks)


def make_chart(
    runs: Sequence[RunData], axis: str | None = None, metric: str | None = None, smooth: int = 1
) -> Chart:
    """Of one environment: a line for each group of runs that differ in the seed alone."""
    metric = metric or choose_metric(runs, axis)
    axis = axis or ("episodes" if metric == EPISODE_RETURN else "steps")
    _check_arguments(axis, metric, smooth)
    curves: dict[Path, Curve] = {}
    remarks = _Remarks()
    for run in runs:
        with remarks.skip_errors():
            curves[run.folder] = _make_curve(run, axis, metric, smooth)
    remarks.require_any(curves)
    window = _resolve_window(metric, smooth)
    groups = group_runs([run for run in runs if run.folder in curves])
    lines = [line for group in groups for line in _make_lines(group, curves, window, remarks)]
    line_groups = [group for _, group in lines]
    series = [replace(line, name=group.name) for line, group in lines]
    series, axis_label = _apply_units(series, axis, runs)
    averaged = f", mean of {smooth}" if smooth > 1 and metric != EPISODE_RETURN else ""
    environment = runs[0].environment
    return Chart(
        title=f"{environment}: {line_groups[0].label}" if len(line_groups) == 1 else environment,
        x_label=axis_label,
        y_label=_METRIC_LABELS.get(metric, metric) + averaged,
        series=tuple(series),
        line_note=LINE_NOTE if any(len(group.runs) > 1 for group in line_groups) else "",
        band_note=_format_band_note(line_groups, metric, smooth),
        remark=str(remarks),
    )


def _make_lines(
    group: RunGroup, curves: Mapping[Path, Curve], window: int, remarks: _Remarks
) -> Iterator[tuple[Series, RunGroup]]:
    """One line of all seeds, or one of each where they never meet."""
    group_curves = [curves[run.folder] for run in group.runs]
    if len(group_curves) == 1:
        yield make_single_series(group.label, group_curves[0], window), group
        return
    line = make_mean_series(group.label, group_curves, window)
    if line is not None:
        share = compute_overlap(group_curves)
        if share < _SHARE_WITHOUT_REMARK:
            remarks.add(f"{group.label}: what all have, the first {share:.0%} of the longest run.")
        yield line, group
        return
    remarks.add(f"{group.label}: each by itself, for they have no stretch of the axis in common.")
    for run_group, curve in zip(split_group(group), group_curves, strict=True):
        yield make_single_series(run_group.label, curve, window), run_group


def choose_metric(runs: Sequence[RunData], axis: str | None = None) -> str:
    """Evaluations where they make a curve; else what was seen in training."""
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
    if metric != EPISODE_RETURN and metric not in NAMES:
        metrics = [EPISODE_RETURN, *NAMES]
        close = difflib.get_close_matches(metric, metrics, n=3, cutoff=0.5) or metrics
        raise ConfigError(f"There is no metric {metric!r}.", f"--metric {', '.join(close)}")
    if smooth < 1:
        raise ConfigError(f"--smooth is {smooth}.", "--smooth 5, the number of points to average")


def _resolve_window(metric: str, smooth: int) -> int:
    """How many episodes a point of their moving average is the mean of."""
    if metric != EPISODE_RETURN:
        return 0
    return smooth if smooth > 1 else WINDOW_EPISODES


def _make_curve(run: RunData, axis: str, metric: str, smooth: int) -> Curve:
    if metric == EPISODE_RETURN:
        return _make_episode_curve(run, axis, _resolve_window(metric, smooth))
    steps, values = run.read_values(metric)
    if not len(steps):
        raise CheckpointError(f"{run.folder} has no {metric} yet.", "--metric NAME draws another")
    low = high = None
    if metric == EVALUATION and smooth == 1:
        ends = [run.read_values(name)[1] for name in ("eval_return_low", "eval_return_high")]
        low, high = ends if all(len(end) == len(steps) for end in ends) else (None, None)
    return Curve(compute_positions(run, steps, axis), smooth_values(values, smooth), low, high)


def _make_episode_curve(run: RunData, axis: str, window: int) -> Curve:
    """Every episode as a dot, and their moving average."""
    returns, lengths = run.read_episodes()
    if not len(returns):
        raise CheckpointError(f"{run.folder} has finished no episode yet.", "try again when it has")
    # Where each ended.
    episodes = np.arange(1.0, len(lengths) + 1.0)
    x = episodes if axis == "episodes" else compute_positions(run, np.cumsum(lengths), axis)
    return Curve(x[window - 1 :], compute_moving_average(returns, window), dots=(x, returns))


def compute_positions(run: RunData, steps: Float64, axis: str) -> Float64:
    """Where on an axis a run stood after so many steps."""
    if axis == "steps":
        return steps / _count_learners(run)
    if axis == "total-steps":
        return steps
    if axis == "episodes":
        return _interpolate_from_zero(steps, *run.read_values("episodes"))
    clock = run.compute_elapsed_s("wall_s") if axis == "wall" else _read_cpu_s(run)
    if clock is None:
        quantity = "wall clock" if axis == "wall" else "workers' processor time"
        raise CheckpointError(
            f"{run.folder} has no record of its {quantity}.", "-x steps draws it over steps"
        )
    return _interpolate_from_zero(steps, *clock)


def _interpolate_from_zero(steps: Float64, at: Float64, values: Float64) -> Float64:
    result: Float64 = np.interp(steps, np.append(0.0, at), np.append(0.0, values))
    return result


def _count_learners(run: RunData) -> int:
    """How many learned together; a run that does not say had one."""
    return run.get_runtime_count("learners") or 1


def _read_cpu_s(run: RunData) -> tuple[Float64, Float64] | None:
    """Executors of a cluster do not tell what they spent; a run in one process has no workers."""
    fleets = {machine.get("fleet") for machine in run.machines}
    if fleets == {"inline"}:
        return run.compute_elapsed_s("driver_cpu_s")
    if not fleets or any(map(is_remote, fleets)):
        return None
    return run.compute_elapsed_s("driver_cpu_s", "workers_cpu_s")


def _apply_units(
    series: Sequence[Series], axis: str, runs: Sequence[RunData]
) -> tuple[list[Series], str]:
    label = AXES[axis]
    if axis in ("steps", "total-steps"):
        several = any(_count_learners(run) > 1 for run in runs)
        return list(series), f"{label}{_STEPS_OF[axis] if several else ''}"
    if axis not in ("wall", "cpu"):
        return list(series), label
    longest = max(float(line.collect_x().max(initial=0.0)) for line in series)
    divisor, unit = next((unit, name) for least, unit, name in _UNITS if longest >= least)
    return [line.scale_x(divisor) for line in series], f"{label} ({unit})"


def _format_band_note(line_groups: Sequence[RunGroup], metric: str, smooth: int) -> str:
    notes = []
    if any(len(group.runs) > 1 for group in line_groups):
        notes.append("over seeds")
    if metric == EVALUATION and smooth == 1 and any(len(group.runs) == 1 for group in line_groups):
        notes.append("of a single run over its evaluation episodes")
    return f"Band: 95% bootstrap interval {', or '.join(notes)}." if notes else ""


def smooth_values(values: Float64, window: int) -> Float64:
    """Each value with those before it, up to `window` in all; the first ones with fewer."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    means: Float64 = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def compute_moving_average(values: Float64, window: int) -> Float64:
    """Element i is the mean of `window` values, the last of them values[i + window - 1]."""
    return smooth_values(values, window)[window - 1 :]


def make_common_grid(xs: Sequence[Float64]) -> Float64:
    """Where all of them have values: their own points if those are few, else evenly spread."""
    first, last = max(x[0] for x in xs), min(x[-1] for x in xs)
    if first > last:
        return np.zeros(0)
    points: Float64 = np.unique(np.concatenate(xs))
    points = points[(points >= first) & (points <= last)]
    if len(points) <= _GRID_POINTS:
        return points
    return np.linspace(first, last, _GRID_POINTS)


def make_single_series(label: str, curve: Curve, average_of: int = 0) -> Series:
    """A single run as it is."""
    return Series(label, curve.x, curve.y, curve.low, curve.high, curve.dots, average_of)


def make_mean_series(label: str, curves: Sequence[Curve], average_of: int = 0) -> Series | None:
    """Several runs as their interquartile mean and its interval.

    None where they have no stretch of the axis in common.
    """
    xs, dots = [curve.x for curve in curves], _concatenate_dots(curves)
    if not all(map(len, xs)):  # too few values for an average of all
        return Series(label, np.zeros(0), np.zeros(0), dots=dots, average_of=average_of)
    grid = make_common_grid(xs)
    if not len(grid) or (len(grid) == 1 and max(map(len, xs)) > 1):
        return None
    values = np.stack([np.interp(grid, curve.x, curve.y) for curve in curves])
    return Series(label, grid, *compute_iqm_band(values), dots, average_of)


def _concatenate_dots(curves: Sequence[Curve]) -> tuple[Float64, Float64] | None:
    dots = [curve.dots for curve in curves if curve.dots is not None]
    if not dots:
        return None
    return np.concatenate([x for x, _ in dots]), np.concatenate([y for _, y in dots])


def compute_overlap(curves: Sequence[Curve]) -> float:
    """How much of the longest curve all of them have, from 0 to 1."""
    ends = [float(curve.x[-1]) for curve in curves if len(curve.x)]
    return min(ends) / max(ends) if ends and max(ends) > 0.0 else 1.0
