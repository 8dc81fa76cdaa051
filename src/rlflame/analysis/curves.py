"""From runs to the lines of a chart: which metric, over what, smoothed, seeds taken together.

Must not know: how a chart is drawn.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlflame.analysis.grouping import Group, groups, split
from rlflame.analysis.plots.chart import Chart, Panels, Series
from rlflame.analysis.smoothing import (
    Curve,
    alone,
    interpolated,
    moving_average,
    shared,
    smoothed,
    together,
)
from rlflame.errors import CheckpointError, ConfigError
from rlflame.rollout.spec import Float64
from rlflame.storage.metrics import NAMES
from rlflame.storage.run_reader import Recorded

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
#: A line that shows less of the longest of its runs says so.
_MUCH = 0.5


def picture(
    runs: Sequence[Recorded], axis: str | None = None, metric: str | None = None, smooth: int = 1
) -> Chart | Panels:
    """A chart; of several environments one for each, for their returns have no scale in common.

    What cannot be drawn is left out with a remark, as long as there is something that can.
    """
    metric = metric or sensible_metric(runs, axis)
    environments = dict.fromkeys(run.environment for run in runs)
    if len(environments) == 1:
        return chart(runs, axis, metric, smooth)
    charts, found, remarks = [], [], _Remarks()
    for environment in environments:
        alike = [run for run in runs if run.environment == environment]
        with remarks.left_out():
            panel, its = _drawn(alike, axis, metric, smooth)
            charts.append(replace(panel, title=environment, line_note="", band_note="", remark=""))
            found += its
            remarks.add(f"{environment}: {panel.remark}" if panel.remark else "")
    remarks.need(charts)
    notes = _line_note(found), _band_note(found, metric, smooth)
    return Panels(tuple(charts), *notes, str(remarks))


def chart(
    runs: Sequence[Recorded], axis: str | None = None, metric: str | None = None, smooth: int = 1
) -> Chart:
    """Of one environment: a line for each group of runs that differ in the seed alone."""
    return _drawn(runs, axis, metric or sensible_metric(runs, axis), smooth)[0]


class _Remarks:
    """What is not drawn, or not as usual; an error where nothing is."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._errors: list[CheckpointError] = []

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._errors.append(error)
            self.add(f"{error.message} It is left out.")

    def add(self, remark: str) -> None:
        self._said += [remark] if remark else []

    def need(self, drawn: Collection[object]) -> None:
        if not drawn and self._errors:
            raise self._errors[0]

    def __str__(self) -> str:
        return " ".join(self._said)


def _drawn(
    runs: Sequence[Recorded], axis: str | None, metric: str, smooth: int
) -> tuple[Chart, list[Group]]:
    """A chart, and whose its lines are."""
    axis = axis or ("episodes" if metric == EPISODE_RETURN else "steps")
    _check(axis, metric, smooth)
    curves: dict[Path, Curve] = {}
    remarks = _Remarks()
    for run in runs:
        with remarks.left_out():
            curves[run.folder] = _curve(run, axis, metric, smooth)
    remarks.need(curves)
    series, found = [], []
    for group in groups([run for run in runs if run.folder in curves]):
        for line, whose in _lines(group, curves, _window(metric, smooth), remarks):
            series.append(replace(line, name=whose.name))
            found.append(whose)
    series, axis_label = _with_units(series, axis, runs)
    averaged = f", mean of {smooth}" if smooth > 1 and metric != EPISODE_RETURN else ""
    drawn = Chart(
        title=_title(found),
        x_label=axis_label,
        y_label=_WORDS.get(metric, metric) + averaged,
        series=tuple(series),
        line_note=_line_note(found),
        band_note=_band_note(found, metric, smooth),
        remark=str(remarks),
    )
    return drawn, found


def _lines(
    group: Group, curves: Mapping[Path, Curve], window: int, remarks: _Remarks
) -> Iterator[tuple[Series, Group]]:
    """One line of all seeds, or one of each where they never meet."""
    mine = [curves[run.folder] for run in group.runs]
    if len(mine) == 1:
        yield alone(group.label, mine[0], window), group
        return
    line = together(group.label, mine, window)
    if line is not None:
        share = shared(mine)
        if share < _MUCH:
            remarks.add(f"{group.label}: what all have, the first {share:.0%} of the longest run.")
        yield line, group
        return
    remarks.add(f"{group.label}: each by itself, for they have no stretch of the axis in common.")
    for one, curve in zip(split(group), mine, strict=True):
        yield alone(one.label, curve, window), one


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
        known = [EPISODE_RETURN, *NAMES]
        close = difflib.get_close_matches(metric, known, n=3, cutoff=0.5) or known
        raise ConfigError(f"There is no metric {metric!r}.", f"--metric {', '.join(close)}")
    if smooth < 1:
        raise ConfigError(f"--smooth is {smooth}.", "--smooth 5, the number of points to average")


def _window(metric: str, smooth: int) -> int:
    """How many episodes a point of their moving average is the mean of."""
    if metric != EPISODE_RETURN:
        return 0
    return smooth if smooth > 1 else WINDOW_EPISODES


def _curve(run: Recorded, axis: str, metric: str, smooth: int) -> Curve:
    if metric == EPISODE_RETURN:
        return _scattered(run, axis, _window(metric, smooth))
    steps, values = run.values(metric)
    if not len(steps):
        raise CheckpointError(f"{run.folder} has no {metric} yet.", "--metric NAME draws another")
    low = high = None
    if metric == EVALUATION and smooth == 1:
        ends = [run.values(name)[1] for name in ("eval_return_low", "eval_return_high")]
        low, high = ends if all(len(end) == len(steps) for end in ends) else (None, None)
    return Curve(positions(run, steps, axis), smoothed(values, smooth), low, high)


def _scattered(run: Recorded, axis: str, window: int) -> Curve:
    """Every episode as a dot, and their moving average."""
    returns, lengths = run.episodes()
    if not len(returns):
        raise CheckpointError(f"{run.folder} has finished no episode yet.", "try again when it has")
    x = episode_positions(run, lengths, axis)
    return Curve(x[window - 1 :], moving_average(returns, window), dots=(x, returns))


def positions(run: Recorded, steps: Float64, axis: str) -> Float64:
    """Where on an axis a run stood after so many steps."""
    if axis == "steps":
        return steps / _learners(run)
    if axis == "total-steps":
        return steps
    if axis == "episodes":
        at, episodes = run.values("episodes")
        return interpolated(steps, np.append(0.0, at), np.append(0.0, episodes))
    clock = run.clock("wall_s") if axis == "wall" else _processor(run)
    if clock is None:
        what = "wall clock" if axis == "wall" else "workers' processor time"
        raise CheckpointError(
            f"{run.folder} has no record of its {what}.", "-x steps draws it over steps"
        )
    at, seconds = clock
    return interpolated(steps, np.append(0.0, at), np.append(0.0, seconds))


def episode_positions(run: Recorded, lengths: Float64, axis: str) -> Float64:
    """Where each episode ended."""
    if axis == "episodes":
        return np.arange(1.0, len(lengths) + 1.0)
    return positions(run, np.cumsum(lengths), axis)


def _learners(run: Recorded) -> int:
    """How many learned together; a run that does not say had one."""
    return run.counted("learners") or 1


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
