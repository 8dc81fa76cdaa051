"""A whole report from the names of runs or of benchmark results, and what it shows.

Must not know: how it is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlflame.analysis import curves
from rlflame.analysis.plots.chart import Chart
from rlflame.analysis.report import bench_comparison, text
from rlflame.analysis.report.data import comparisons, gather
from rlflame.analysis.report.document import Document
from rlflame.errors import ConfigError, RlflameError, typed
from rlflame.statistics import FEWEST_SEEDS, Verdict
from rlflame.storage import run_reader
from rlflame.storage.run_reader import Recorded

CLAIMS = ("better", "equivalent", "not-worse")


@dataclass(frozen=True)
class Shown:
    """Of one subject, which claims hold, and the numbers that decide."""

    subject: str
    verdict: Verdict
    unit: str = ""

    def holds(self, claim: str) -> bool:
        return self.verdict.as_dict()[claim.replace("-", "_")]


@dataclass(frozen=True)
class Composed:
    """The report as blocks, the same as JSON, and what a comparison has shown."""

    document: Document
    facts: dict[str, Any]
    shown: tuple[Shown, ...]
    notes: tuple[str, ...]


class NotShown(RlflameError):
    """A claim that the numbers do not carry."""


def compose(ours: Sequence[Path], theirs: Sequence[Path], margin: float) -> Composed:
    """`margin` is a share. Benchmark results are .json files, runs are folders."""
    for path in (*ours, *theirs):
        if (file := bench_comparison.meant(path)) is not None:
            raise ConfigError(
                f"{path} is of a benchmark, whose results are in its .json file.",
                typed("report", file),
            )
    tables = [path for path in (*ours, *theirs) if path.suffix == ".json"]
    if not tables:
        return _of_runs(ours, theirs, margin)
    if len(ours) != 1 or len(theirs) > 1 or len(tables) != len(ours) + len(theirs):
        raise ConfigError(
            "Results of a benchmark are shown alone, or one beside one.",
            "rlflame report now.json --vs before.json",
        )
    return _of_measurements(ours[0], theirs, margin)


def demand(composed: Composed, claim: str) -> None:
    """A NotShown unless the claim holds of everything that was compared."""
    for one in composed.shown:
        if not one.holds(claim):
            raise NotShown(
                f"Not shown: {claim.replace('-', ' ')} in {one.subject}. {_why(one, claim)}",
                "more seeds, or more repetitions, make intervals narrower",
            )


def _why(one: Shown, claim: str) -> str:
    found = one.verdict
    if not found.enough:
        return f"It takes {FEWEST_SEEDS} on each side."
    level, interval = ("95%", found.gain) if claim == "better" else ("90%", found.equivalence)
    bound = {
        "better": "above 0",
        "equivalent": f"within ±{found.margin:,.4g}{one.unit}",
        "not-worse": f"above -{found.margin:,.4g}{one.unit}",
    }[claim]
    return (
        f"The difference's {level} interval is [{interval.low:,.4g}, {interval.high:,.4g}]"
        f"{one.unit}; it would have to lie {bound}."
    )


def _of_runs(ours: Sequence[Path], theirs: Sequence[Path], margin: float) -> Composed:
    runs, notes = run_reader.read_all(list(ours))
    other, more = run_reader.read_all(list(theirs))
    for run in (*runs, *other):
        if not run.metrics and run.evaluation is None:
            raise RlflameError(
                f"{run.folder} has nothing to report yet.", "try again after its first iteration"
            )
    compared = comparisons(runs, other, margin) if theirs else []
    facts = {
        **gather([*runs, *other]),
        "comparisons": [{"environment": name, **one.as_dict()} for name, one in compared],
    }
    document = text.document(facts, _charts([*runs, *other]), compared)
    shown = tuple(
        Shown(name, one.verdict)
        for name, one in compared
    )  # fmt: skip
    return Composed(document, facts, shown, (*notes, *more))


def _charts(runs: Sequence[Recorded]) -> list[Chart]:
    """Of each environment the curves over steps and, where it was recorded, over time."""
    found = []
    for environment in dict.fromkeys(run.environment for run in runs):
        alike = [run for run in runs if run.environment == environment]
        for axis in ("total-steps", "wall"):
            try:
                found.append(curves.chart(alike, axis, _metric(alike)))
            except RlflameError:
                continue  # a report without a curve is still a report
    return found


def _metric(runs: Sequence[Recorded]) -> str:
    metric = curves.sensible_metric(runs)
    return curves.TRAINING_RETURN if metric == curves.EPISODE_RETURN else metric


def _of_measurements(ours: Path, theirs: Sequence[Path], margin: float) -> Composed:
    mine = bench_comparison.read(ours)
    title = f"Benchmark: {ours.stem}"
    facts: dict[str, Any] = {
        "measurements": [{**asdict(m), "median": m.median} for m in mine.found],
        "doubts": list(mine.doubts),
    }
    if not theirs:
        return Composed(Document(title, (bench_comparison.listed(mine),)), facts, (), ())
    other = bench_comparison.read(theirs[0])
    changes = bench_comparison.changes(mine.found, other.found, margin)
    doubts = facts["doubts"] = bench_comparison.doubts(mine, other)
    facts["changes"] = [_fact(one) for one in changes]
    shown = tuple(
        Shown(one.name, one.verdict, "%")
        for one in changes
    )  # fmt: skip
    section = bench_comparison.compared(changes, mine, other, doubts)
    return Composed(Document(title, (section,)), facts, shown, ())


def _fact(change: bench_comparison.Change) -> dict[str, Any]:
    """Of fewer repetitions than an interval takes, its ends are null."""
    found = {**asdict(change), **change.verdict.as_dict()}
    if not change.verdict.enough:
        for interval in ("improvement", "equivalence"):
            found[interval] |= {"low": None, "high": None}
    return found
