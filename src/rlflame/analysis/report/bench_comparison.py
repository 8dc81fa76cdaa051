"""Results of benchmarks, side by side: medians, and the change in percent (`.json` files).

Must not know: how they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.analysis.report.document import Section, Table
from rlflame.analysis.report.text import NOTHING, format_number
from rlflame.config import regular_file
from rlflame.config.toml_io import format_value
from rlflame.errors import CheckpointError, ConfigError
from rlflame.rollout.blas import THREAD_VARIABLES
from rlflame.statistics import Interval, Significance, compare_medians
from rlflame.storage import run_files

#: Of `rlflame bench`'s files, without their ends.
NAMES = ("scaling", "rollouts", "replay", "learners", "dppo", "dsac")
_MACHINE_FIELDS = ("processor", "usable_cores", "blas", "python")
_MAX_VALUE = 1e100
_SMALL_VALUE = 1e-6


@dataclass(frozen=True, slots=True)
class Measurement:
    """One quantity, measured a number of times."""

    name: str
    unit: str
    higher_is_better: bool
    values: tuple[float, ...]
    #: What was done each time, where that is more than the name says: settings by name.
    work: dict[str, Any] = field(default_factory=dict)
    #: Tasks that went to a second worker, of each value; empty where nothing says it.
    retried: tuple[int, ...] = ()

    @property
    def median(self) -> float:
        return float(np.median(self.values))


@dataclass(frozen=True, slots=True)
class BenchmarkResults:
    """All of one file, and what has to be known to read it."""

    name: str
    measurements: tuple[Measurement, ...]
    #: What it ran on and with, by name.
    conditions: dict[str, str]
    #: Sentences that begin with who they are of.
    doubts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """Of a quantity, in percent of what it was; improvement is positive whichever way is better."""

    name: str
    unit: str
    medians: tuple[float, float]
    repetitions: tuple[int, int]
    improvement: Interval
    #: The same at 90%, for the two one-sided tests of equivalence.
    equivalence: Interval
    margin: float

    @property
    def verdict(self) -> Significance:
        return Significance(self.repetitions, self.improvement, self.equivalence, self.margin)


def read_results(path: Path) -> BenchmarkResults:
    """`{"measurements": [{"name", "unit", "better": "higher" | "lower", "values"}]}`."""
    try:
        data = run_files.parse_json(regular_file.read_text(path, regular_file.RECORD_BYTES))
        measurements = [_parse_measurement(entry) for entry in data["measurements"]]
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}.", "check its name"
        ) from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{path} holds no results of a benchmark.",
            'it needs "measurements", each with name, unit, better (higher or lower) and values',
        ) from error
    if not measurements or len({measurement.name for measurement in measurements}) < len(
        measurements
    ):
        raise CheckpointError(f"{path} has no measurements, or one twice.", "check how it was made")
    doubts = []
    if data.get("complete") is False:
        doubts.append(f"{path} was stopped before its end.")
    if data.get("busy") is True:
        doubts.append(f"{path} was measured on a machine that was busy with other work.")
    retried_names = [measurement.name for measurement in measurements if any(measurement.retried)]
    if retried_names:
        doubts.append(
            f"In {path} tasks were collected again, which takes longer, while this was measured: "
            f"{'; '.join(retried_names)}."
        )
    return BenchmarkResults(str(path), tuple(measurements), _read_conditions(data), tuple(doubts))


def find_results(path: Path) -> Path | None:
    """The results of a benchmark that whoever names their folder, or their table, may mean."""
    if path.suffix == ".json" or (path / "config.toml").exists():
        return None
    named = [path / f"{name}.json" for name in NAMES] if path.is_dir() else []
    candidates = [*named, *([path.with_suffix(".json")] if path.suffix == ".csv" else [])]
    return next((file for file in candidates if file.is_file()), None)


def _read_conditions(data: dict[str, Any]) -> dict[str, str]:
    """What seconds depend on, of what the file says."""
    machine, threads = (_as_dict(data.get(name)) for name in ("machine", "threads"))
    conditions = {
        name.replace("_", " "): machine[name] for name in _MACHINE_FIELDS if name in machine
    }
    conditions |= _as_dict(machine.get("packages"))
    conditions |= (
        {name: threads.get(name, "unset") for name in THREAD_VARIABLES} if "threads" in data else {}
    )
    return {name: str(value) for name, value in conditions.items()}


def _as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _parse_measurement(entry: dict[str, object]) -> Measurement:
    values = entry["values"]
    if entry["better"] not in ("higher", "lower") or not isinstance(values, list) or not values:
        raise ValueError("not a measurement")
    if not all(type(value) in (int, float) for value in values):
        raise ValueError("not numbers")
    numbers = tuple(float(value) for value in values)
    if not all(0.0 <= value < _MAX_VALUE for value in numbers):
        raise ValueError("not finite, or of nothing that can be measured")
    higher = entry["better"] == "higher"
    return Measurement(
        str(entry["name"]),
        str(entry.get("unit", "")),
        higher,
        numbers,
        _as_dict(entry.get("work")),
        _parse_counts(entry.get("retried", []), len(numbers)),
    )


def _parse_counts(counts: object, times: int) -> tuple[int, ...]:
    """One of each value, or none where nothing says any."""
    if not isinstance(counts, list) or len(counts) not in (0, times):
        raise ValueError("not a count of each value")
    if not all(run_files.is_count(count) for count in counts):
        raise ValueError("not counts")
    return tuple(counts)


def compare_measurements(
    current: Sequence[Measurement], baseline: Sequence[Measurement], margin: float
) -> list[Change]:
    """Of what was measured on both sides, from theirs to ours; `margin` is a share."""
    before = {measurement.name: measurement for measurement in baseline}
    pairs = [
        (measurement, before[measurement.name])
        for measurement in current
        if measurement.name in before
    ]
    if not pairs:
        raise ConfigError(
            "Nothing was measured on both sides: "
            f"{', '.join(measurement.name for measurement in current)}; "
            f"{', '.join(before)}.",
            "compare results of the same benchmark",
        )
    return [_make_change(measurement, other, margin) for measurement, other in pairs]


def find_doubts(current: BenchmarkResults, baseline: BenchmarkResults) -> list[str]:
    """What a comparison has to be read with."""
    sentences = list(dict.fromkeys((*baseline.doubts, *current.doubts)))
    before, now = baseline.conditions, current.conditions
    unlike = [
        f"{name} {before.get(name, 'absent')} before, {now.get(name, 'absent')} now"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if before and now and unlike:
        sentences.append(f"They were not measured alike: {'; '.join(unlike)}.")
    for results, counterpart in ((current, baseline), (baseline, current)):
        if not results.conditions:
            sentences.append(f"{results.name} does not say what it was measured on.")
        if not all(measurement.work for measurement in results.measurements):
            sentences.append(
                f"{results.name} does not say what work it timed: that may be other work."
            )
        other_work = {
            measurement.name: measurement.work for measurement in counterpart.measurements
        }
        unmatched = [
            measurement.name
            for measurement in results.measurements
            if measurement.name not in other_work
        ]
        if unmatched:
            sentences.append(f"In {results.name} alone: {'; '.join(unmatched)}.")
        more = {
            f"{setting} ({format_value(value)})": None
            for measurement in results.measurements
            for setting, value in measurement.work.items()
            if other_work.get(measurement.name) and setting not in other_work[measurement.name]
        }
        if more:
            sentences.append(
                f"{results.name} alone says: {', '.join(more)}; that may be other work."
            )
    return sentences


def _make_change(measurement: Measurement, baseline: Measurement, margin: float) -> Change:
    # A setting that one of them had not yet may be as it was; `find_doubts` says so.
    settings = [name for name in baseline.work if name in measurement.work]
    unlike = [name for name in settings if measurement.work[name] != baseline.work[name]]
    if unlike:
        name = unlike[0]
        raise ConfigError(
            f"{measurement.name} was measured with {name} {format_value(baseline.work[name])} "
            "before, and with "
            f"{format_value(measurement.work[name])} now.",
            "compare results of the same work",
        )
    for before, now in (
        (f"in {baseline.unit or 'no unit'}", f"in {measurement.unit or 'no unit'}"),
        (_format_direction(baseline), _format_direction(measurement)),
    ):
        if before != now:
            raise ConfigError(
                f"{measurement.name} was measured {before} before, and {now} now.",
                "compare results of the same benchmark",
            )
    if 0.0 in baseline.values:
        raise ConfigError(
            f"{measurement.name} was 0 before, of which there are no percent.", "measure it again"
        )
    sign = 1.0 if measurement.higher_is_better else -1.0
    current_values, baseline_values = (
        sign * np.array(side.values, np.float64) for side in (measurement, baseline)
    )
    return Change(
        measurement.name,
        measurement.unit,
        (measurement.median, baseline.median),
        (len(measurement.values), len(baseline.values)),
        compare_medians(current_values, baseline_values),
        compare_medians(current_values, baseline_values, 0.90),
        100.0 * margin,
    )


def _format_direction(measurement: Measurement) -> str:
    return f"with the {'higher' if measurement.higher_is_better else 'lower'} as the better"


def _format_value(value: float) -> str:
    """Two places, or as many more as show three digits of what is small."""
    if 0.0 < value < _SMALL_VALUE:
        return f"{value:.3g}"
    digits = 2 - math.floor(math.log10(value)) if value else 0
    return format_number(value, max(2, digits))


def make_results_section(results: BenchmarkResults) -> Section:
    rows = tuple(
        (measurement.name, measurement.unit, str(len(measurement.values)),
         _format_value(measurement.median),
         _format_value(min(measurement.values)), _format_value(max(measurement.values)))
        for measurement in results.measurements
    )  # fmt: skip
    head = ("measured", "unit", "times", "median", "least", "most")
    return Section("Benchmark", (Table(head, rows, 2), *results.doubts))


def make_comparison_section(
    changes: Sequence[Change],
    current: BenchmarkResults,
    baseline: BenchmarkResults,
    doubts: Sequence[str],
) -> Section:
    rows = tuple(
        (
            change.name,
            change.unit,
            _format_value(change.medians[1]),
            _format_value(change.medians[0]),
            f"{change.improvement.value:+.1f}%",
            f"[{change.improvement.low:+.1f}%, {change.improvement.high:+.1f}%]"
            if change.verdict.has_enough_seeds
            else NOTHING,
        )
        for change in changes
    )
    head = ("measured", "unit", "median before", "median now", "improvement", "95% interval")
    return Section(
        "Benchmark, compared",
        (
            f"Before: {baseline.name}; now: {current.name}. An improvement is positive whichever "
            "way "
            "is better; its interval is a bootstrap over repetitions, from three on.",
            Table(head, rows, 2),
            *doubts,
        ),
    )
