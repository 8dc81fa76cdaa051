"""Writes benchmark results to a folder as JSON, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rlflame import __version__
from rlflame.analysis.plots import matplotlib_backend
from rlflame.analysis.plots.speedup import make_speedup_chart
from rlflame.analysis.report.bench_comparison import BenchmarkResults, Measurement
from rlflame.analysis.report.document import Block, Document, Section, to_markdown
from rlflame.bench.machine_load import format_conditions
from rlflame.console.output import as_json_text
from rlflame.errors import ConfigError
from rlflame.statistics import Interval, compare_medians
from rlflame.storage.safetensors_file import write_atomically


@dataclass
class Side:
    """An alternative that a benchmark measures, such as a fleet with four workers."""

    name: str
    #: Values that distinguish this side from the other sides.
    labels: dict[str, Any]
    #: The measured values of each repetition.
    repetitions: list[dict[str, Any]] = field(default_factory=list)

    def list_values(self, key: str) -> list[Any]:
        return [repetition[key] for repetition in self.repetitions]

    def compute_median(self, key: str) -> float:
        return float(median(self.list_values(key)))

    def make_measurement(
        self,
        key: str,
        unit: str,
        work: dict[str, Any],
        better: Literal["higher", "lower"] = "lower",
    ) -> Measurement:
        retried = tuple(repetition.get("retried", 0) for repetition in self.repetitions)
        return Measurement(self.name, better, tuple(self.list_values(key)), unit, work, retried)


@dataclass(frozen=True)
class BenchResult:
    """The measurements of a benchmark so far."""

    name: str
    #: The contents of --json, apart from the machine and the measurements.
    facts: dict[str, Any]
    blocks: Sequence[Block]
    #: The input of `rlflame report` and `rlflame bench --diff`.
    measurements: Sequence[Measurement]
    #: A table of repetitions for `rlflame plot`; the first row has the column names.
    table: Sequence[Sequence[object]] = ()
    #: Set by the runner: the machine and its load, and whether the benchmark finished.
    conditions: dict[str, Any] = field(default_factory=dict)
    complete: bool = True

    def to_json(self) -> str:
        facts = {
            "benchmark": self.name,
            "rlflame": __version__,
            "complete": self.complete,
            **self.conditions,
            **self.facts,
            "measurements": self.measurements,
        }
        return as_json_text(facts, indent=1)

    def to_markdown(self) -> str:
        doubts = BenchmarkResults.model_construct(
            name=f"{self.name}.json",
            measurements=tuple(self.measurements),
            complete=self.complete,
            busy=self.conditions.get("busy"),
        ).doubts
        conditions = format_conditions(self.conditions) if self.conditions else []
        sections = (
            Section("Results", tuple(self.blocks)),
            Section("Measured on", (*conditions, *doubts)),
        )
        return to_markdown(Document(f"Benchmark: {self.name}", sections))

    def to_csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.table)
        return text.getvalue()


def compute_speedup(base_s: Sequence[float], seconds: Sequence[float]) -> Interval:
    """Return the speed-up of the median time relative to `base_s`, with its interval."""
    gain = compare_medians(base_s, seconds)
    return Interval(*(1.0 + percent / 100.0 for percent in (gain.value, gain.low, gain.high)))


def has_equal_digests(digests: Sequence[str]) -> bool | None:
    """Return whether all digests are equal; None if there are fewer than two."""
    return None if len(digests) < 2 else len(set(digests)) == 1


def format_bits(results: Iterable[bool | None], subject: str) -> list[str]:
    """Return a list with a sentence about bit-identity.

    The list is empty if nothing was compared.
    """
    values = [value for value in results if value is not None]
    if all(values):
        return [f"{subject} are bit-identical in all rows."] if values else []
    return [f"{subject} differ between rows, perhaps because executors run on other machines."]


class ResultFolder:
    """The folder of a benchmark's result files, which are written atomically."""

    def __init__(self, path: Path, name: str) -> None:
        """Raise ConfigError if `path` is a file or contains a result of this name."""
        self._path, self._name = path, name
        if str(path) == "-" or (os.path.lexists(path) and not path.is_dir()):
            raise ConfigError(f"{path} is not a folder.", "-o bench")
        if (file := self._make_path("json")).exists():
            raise ConfigError(f"{file} already exists.", "choose another folder with -o")

    def write(self, result: BenchResult) -> list[Path]:
        """Write all files except the image; return their paths."""
        contents = {"json": result.to_json() + "\n", "md": result.to_markdown()}
        if result.table:
            contents["csv"] = result.to_csv()
        self._path.mkdir(parents=True, exist_ok=True)
        for suffix, text in contents.items():
            write_atomically(self._make_path(suffix), text.encode())
        return [self._make_path(suffix) for suffix in contents]

    def draw(self) -> Path:
        """Draw a chart of the table; raise PlotUnavailableError without matplotlib."""
        matplotlib_backend.check_available()
        file = self._make_path("png")
        chart = make_speedup_chart(self._make_path("csv"))
        write_atomically(file, matplotlib_backend.render_image(chart, file))
        return file

    def _make_path(self, suffix: str) -> Path:
        return self._path / f"{self._name}.{suffix}"
