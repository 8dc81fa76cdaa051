"""Results of benchmarks (`.json` files) side by side: medians, and the change in percent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from rlflame.analysis.report.document import Section, make_table
from rlflame.analysis.report.sections import NOTHING, format_number
from rlflame.config import regular_file
from rlflame.config.toml_io import format_value
from rlflame.errors import CheckpointError, ConfigError
from rlflame.rollout.blas import THREAD_VARIABLES
from rlflame.statistics import Interval, Significance, compare_medians
from rlflame.storage.run_reader import Count

#: Of `rlflame bench`'s files, without their ends.
NAMES = ("scaling", "rollouts", "replay", "learners", "dppo", "dsac")
_MACHINE_FIELDS = ("processor", "usable_cores", "blas", "python")
_SMALL_VALUE = 1e-6
#: Finite, and small enough to be averaged.
_Value = Annotated[float, Field(strict=True, ge=0.0, lt=1e100)]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One quantity, measured a number of times."""

    name: str
    better: Literal["higher", "lower"]
    values: Annotated[tuple[_Value, ...], Field(min_length=1)]
    unit: str = ""
    #: What was done each time, where that is more than the name says: settings by name.
    work: dict[str, Any] = field(default_factory=dict)
    #: Tasks that went to a second worker, of each value; empty where nothing says it.
    retried: tuple[Count, ...] = ()

    @property
    def median(self) -> float:
        return float(np.median(self.values))


class BenchmarkResults(BaseModel):
    """What a comparison reads of one file."""

    measurements: Annotated[tuple[Measurement, ...], Field(min_length=1)]
    complete: Any = None
    busy: Any = None
    machine: dict[str, Any] = {}
    threads: dict[str, Any] | None = None
    #: The path of the file.
    name: str = ""

    @model_validator(mode="after")
    def _check_measurements(self) -> Self:
        if len({m.name for m in self.measurements}) < len(self.measurements):
            raise ValueError("one is there twice")
        if any(len(m.retried) not in (0, len(m.values)) for m in self.measurements):
            raise ValueError("not a count of each value")
        return self

    @property
    def conditions(self) -> dict[str, str]:
        """What it ran on and with, as far as seconds depend on it, by name."""
        packages, threads = self.machine.get("packages"), self.threads
        conditions = {
            **{n.replace("_", " "): self.machine[n] for n in _MACHINE_FIELDS if n in self.machine},
            **(packages if isinstance(packages, dict) else {}),
            **({} if threads is None else {n: threads.get(n, "unset") for n in THREAD_VARIABLES}),
        }
        return {name: str(value) for name, value in conditions.items()}

    @property
    def doubts(self) -> list[str]:
        """Sentences with which it has to be read."""
        sentences = []
        if self.complete is False:
            sentences.append(f"{self.name} was stopped before its end.")
        if self.busy is True:
            sentences.append(
                f"{self.name} was measured on a machine that was busy with other work."
            )
        if retried := "; ".join(m.name for m in self.measurements if any(m.retried)):
            sentences.append(
                f"In {self.name} tasks were collected again, which takes longer: {retried}."
            )
        return sentences


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

    def as_dict(self) -> dict[str, Any]:
        """Of fewer repetitions than an interval takes, its ends are null."""
        fact = {**asdict(self), **self.verdict.as_dict()}
        if not self.verdict.has_enough_seeds:
            for interval in ("improvement", "equivalence"):
                fact[interval] |= {"low": None, "high": None}
        return fact


def read_results(path: Path) -> BenchmarkResults:
    """`{"measurements": [{"name", "unit", "better": "higher" | "lower", "values"}]}`."""
    try:
        text = regular_file.read_text(path, regular_file.RECORD_BYTES)
        results = BenchmarkResults.model_validate_json(text)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}.", "check its name"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} holds no results of a benchmark.",
            'it needs "measurements", each with its own name, unit, better (higher or lower) and '
            "values",
        ) from error
    return results.model_copy(update={"name": str(path)})


def find_results(path: Path) -> Path | None:
    """The results of a benchmark that belong to a folder or a table."""
    if path.suffix == ".json" or (path / "config.toml").exists():
        return None
    candidates = [path / f"{name}.json" for name in NAMES] if path.is_dir() else []
    if path.suffix == ".csv":
        candidates.append(path.with_suffix(".json"))
    return next((file for file in candidates if file.is_file()), None)


def compare_measurements(
    current: Sequence[Measurement], baseline: Sequence[Measurement], margin: float
) -> list[Change]:
    """Of what was measured on both sides, from theirs to ours; `margin` is a share."""
    before = {measurement.name: measurement for measurement in baseline}
    names = [measurement.name for measurement in current]
    if not before.keys() & {*names}:
        raise ConfigError(
            f"Nothing was measured on both sides: {', '.join(names)}; {', '.join(before)}.",
            "compare results of the same benchmark",
        )
    return [
        _make_change(measurement, before[measurement.name], margin)
        for measurement in current
        if measurement.name in before
    ]


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
        other_work = {other.name: other.work for other in counterpart.measurements}
        sentences += _find_omissions(results, other_work)
    return sentences


def _find_omissions(
    results: BenchmarkResults, other_work: Mapping[str, dict[str, Any]]
) -> Iterator[str]:
    """Facts that the results lack, and measurements that only one side has."""
    if not results.conditions:
        yield f"{results.name} does not say what it was measured on."
    if not all(measurement.work for measurement in results.measurements):
        yield f"{results.name} does not say what work it timed: that may be other work."
    if unmatched := [m.name for m in results.measurements if m.name not in other_work]:
        yield f"In {results.name} alone: {'; '.join(unmatched)}."
    more = {
        f"{setting} ({format_value(value)})": None
        for measurement in results.measurements
        for setting, value in measurement.work.items()
        if other_work.get(measurement.name) and setting not in other_work[measurement.name]
    }
    if more:
        yield f"{results.name} alone says: {', '.join(more)}; that may be other work."


def _make_change(measurement: Measurement, baseline: Measurement, margin: float) -> Change:
    _check_same_quantity(measurement, baseline)
    sign = 1.0 if measurement.better == "higher" else -1.0
    values, before = (sign * np.array(side.values) for side in (measurement, baseline))
    return Change(
        measurement.name,
        measurement.unit,
        (measurement.median, baseline.median),
        (len(values), len(before)),
        compare_medians(values, before),
        compare_medians(values, before, 0.90),
        100.0 * margin,
    )


def _check_same_quantity(measurement: Measurement, baseline: Measurement) -> None:
    # A setting that one of them had not yet may be as it was; `find_doubts` says so.
    unlike = [
        (f"with {name} {format_value(value)}", f"with {format_value(measurement.work[name])}")
        for name, value in baseline.work.items()
        if measurement.work.get(name, value) != value
    ]
    descriptions = (
        (f"in {side.unit or 'no unit'}", f"with the {side.better} as the better")
        for side in (baseline, measurement)
    )
    unlike += [(before, now) for before, now in zip(*descriptions, strict=True) if before != now]
    if unlike:
        raise ConfigError(
            f"{measurement.name} was measured {unlike[0][0]} before, and {unlike[0][1]} now.",
            "compare results of the same work",
        )
    if 0.0 in baseline.values:
        raise ConfigError(
            f"{measurement.name} was 0 before, of which there are no percent.", "measure it again"
        )


def _format_value(value: float) -> str:
    """Two places, or as many more as show three digits of what is small."""
    if 0.0 < value < _SMALL_VALUE:
        return f"{value:.3g}"
    digits = 2 - math.floor(math.log10(value)) if value else 0
    return format_number(value, max(2, digits))


def make_results_section(results: BenchmarkResults) -> Section:
    rows = [
        {
            "measured": m.name,
            "unit": m.unit,
            "times": str(len(m.values)),
            "median": _format_value(m.median),
            "least": _format_value(min(m.values)),
            "most": _format_value(max(m.values)),
        }
        for m in results.measurements
    ]
    return Section("Benchmark", (make_table(rows, words=2), *results.doubts))


def make_comparison_section(
    changes: Sequence[Change],
    current: BenchmarkResults,
    baseline: BenchmarkResults,
    doubts: Sequence[str],
) -> Section:
    rows = [
        {
            "measured": change.name,
            "unit": change.unit,
            "median before": _format_value(change.medians[1]),
            "median now": _format_value(change.medians[0]),
            "improvement": f"{change.improvement.value:+.1f}%",
            "95% interval": f"[{change.improvement.low:+.1f}%, {change.improvement.high:+.1f}%]"
            if change.verdict.has_enough_seeds
            else NOTHING,
        }
        for change in changes
    ]
    return Section(
        "Benchmark, compared",
        (
            f"Before: {baseline.name}; now: {current.name}. An improvement is positive whichever "
            "way is better; its interval is a bootstrap over repetitions, from three on.",
            make_table(rows, words=2),
            *doubts,
        ),
    )
