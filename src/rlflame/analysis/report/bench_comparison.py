"""Compares the medians of two benchmark results (`.json` files)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from rlflame.analysis.report.document import Section, make_table
from rlflame.config import regular_file
from rlflame.config.nested_dict import flatten
from rlflame.config.toml_io import format_value
from rlflame.errors import CheckpointError, ConfigError
from rlflame.statistics import Comparison, compare_medians
from rlflame.storage.run_reader import Count

#: A measured value: finite, and small enough that a mean does not overflow.
_Value = Annotated[float, Field(strict=True, ge=0.0, lt=1e100)]
_COLUMNS = (
    *(("measured", "name", ""), "unit", ("repetitions", "times", "")),
    *("median", ("min", "least", ""), ("max", "most", "")),
)
_CHANGES = (("median before", "before", ""), ("improvement, %", "improvement", "+.1f"))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The repeated measurements of one quantity."""

    name: str
    better: Literal["higher", "lower"]
    values: Annotated[tuple[_Value, ...], Field(min_length=1)]
    unit: str = ""
    #: The settings that affect the timed work, by name.
    work: dict[str, Any] = field(default_factory=dict)
    #: For each value, the number of tasks that were retried; empty if not recorded.
    retried: tuple[Count, ...] = ()

    @property
    def median(self) -> float:
        return float(np.median(self.values))


class BenchmarkResults(BaseModel):
    """The part of a result file that a comparison reads."""

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
            raise ValueError("names of measurements are not unique")
        if any(len(m.retried) not in (0, len(m.values)) for m in self.measurements):
            raise ValueError("retried needs one count for each value")
        return self

    @property
    def conditions(self) -> dict[str, Any]:
        """Facts about the machine and its thread settings, by name."""
        return {**dict(flatten(self.machine)), **(self.threads or {})}

    @property
    def doubts(self) -> list[str]:
        """Sentences about conditions that make the result unreliable."""
        retried = "; ".join(m.name for m in self.measurements if any(m.retried))
        sentences = {
            "is incomplete because the benchmark was stopped": self.complete is False,
            "was measured on a machine that was busy with other work": self.busy is True,
            f"contains retried tasks, which take longer: {retried}": retried,
        }
        return [f"{self.name} {sentence}." for sentence, holds in sentences.items() if holds]


@dataclass(frozen=True, slots=True)
class Change:
    """The change in a quantity from a baseline, in percent.

    A positive change is an improvement.
    """

    current: Measurement
    baseline: Measurement
    verdict: Comparison

    def as_dict(self) -> dict[str, Any]:
        """Return the change as JSON data.

        If there are too few repetitions, the bounds of the intervals are null.
        """
        verdict = self.verdict
        unknown = {} if verdict.has_enough_seeds else {"low": None, "high": None}
        return {
            "name": self.current.name,
            "unit": self.current.unit,
            "medians": (self.current.median, self.baseline.median),
            "repetitions": verdict.seeds,
            "improvement": asdict(verdict.difference) | unknown,
            "equivalence": asdict(verdict.equivalence) | unknown,
            "margin": verdict.margin,
            **verdict.verdicts,
        }


def read_results(path: Path) -> BenchmarkResults:
    """Read a result file; raise CheckpointError if it has no benchmark results."""
    try:
        text = regular_file.read_text(path, regular_file.RECORD_BYTES)
        results = BenchmarkResults.model_validate_json(text)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}.", "check its name"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} does not contain benchmark results.",
            'the file needs "measurements", each with a unique name, unit, better (higher or lower)'
            " and values",
        ) from error
    return results.model_copy(update={"name": str(path)})


def compare_measurements(
    current: Sequence[Measurement], baseline: Sequence[Measurement], margin: float
) -> list[Change]:
    """Compare the measurements that both results have; `margin` is a fraction."""
    by_name = {measurement.name: measurement for measurement in baseline}
    changes = [_make_change(m, by_name[m.name], margin) for m in current if m.name in by_name]
    if not changes:
        raise ConfigError("The results have no common measurement.", "compare the same benchmark")
    return changes


def _make_change(measurement: Measurement, baseline: Measurement, margin: float) -> Change:
    base_work, own_work = (
        {**side.work, "unit": side.unit, "better": side.better} for side in (baseline, measurement)
    )
    # A setting that only one result has is not an error: `find_doubts` reports it.
    for name, value in base_work.items():
        if own_work.get(name, value) != value:
            raise ConfigError(
                f"{measurement.name} was measured with {name} {format_value(value)} before, and "
                f"with {format_value(own_work[name])} now.",
                "compare results of the same work",
            )
    if 0.0 in baseline.values:
        raise ConfigError(
            f"{measurement.name} was 0 before, so the change is undefined.", "measure it again"
        )
    sign = 1.0 if measurement.better == "higher" else -1.0
    values, old_values = (sign * np.array(side.values) for side in (measurement, baseline))
    verdict = Comparison(
        (len(values), len(old_values)),
        compare_medians(values, old_values),
        compare_medians(values, old_values, 0.90),
        100.0 * margin,
    )
    return Change(measurement, baseline, verdict)


def find_doubts(current: BenchmarkResults, baseline: BenchmarkResults) -> list[str]:
    """Return sentences about everything that makes the comparison unreliable."""
    sentences = list(dict.fromkeys((*baseline.doubts, *current.doubts)))
    base_work, own_work = baseline.conditions, current.conditions
    unlike = [
        f"{name} {base_work.get(name, 'absent')} before, {own_work.get(name, 'absent')} now"
        for name in {**base_work, **own_work}
        if base_work.get(name) != own_work.get(name) and name != "memory_bytes"
    ]
    if unlike:
        sentences.append(f"The conditions differ: {'; '.join(unlike)}.")
    for results, counterpart in ((current, baseline), (baseline, current)):
        other_work = {other.name: other.work for other in counterpart.measurements}
        facts = [
            *(m.name for m in results.measurements if m.name not in other_work),
            *(
                f"{setting} ({format_value(value)})"
                for m in results.measurements
                for setting, value in m.work.items()
                if setting not in other_work.get(m.name, m.work)
            ),
        ]
        if facts:
            sentences.append(f"Only in {results.name}: {'; '.join(dict.fromkeys(facts))}.")
    return sentences


def _format_quantity(value: float) -> str:
    return f"{value:,.2f}" if value >= 1.0 else f"{value:.3g}"


def make_section(
    results: BenchmarkResults, changes: Sequence[Change], doubts: Sequence[str]
) -> Section:
    """Return a table of the measurements, with their changes if there are any."""
    by_name = {change.current.name: change for change in changes}
    rows = []
    for m in results.measurements:
        values = {"median": m.median, "least": min(m.values), "most": max(m.values)}
        row = {"name": m.name, "unit": m.unit, "times": len(m.values)}
        if change := by_name.get(m.name):
            values["before"] = change.baseline.median
            row |= {"times": min(change.verdict.seeds), "improvement": change.verdict.difference}
        rows.append({**row, **{key: _format_quantity(value) for key, value in values.items()}})
    note = (
        "A positive value is an improvement. The 95% interval comes from a bootstrap over at "
        "least three repetitions."
    )
    if not changes:
        return Section("Benchmark", (make_table(rows, _COLUMNS, 2), *doubts))
    table = make_table(rows, (*_COLUMNS, *_CHANGES), 2)
    return Section("Benchmark", (note, table, *doubts))
