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
from rlflame.analysis.report.data import collect_data, compare_environments
from rlflame.analysis.report.document import Document
from rlflame.errors import ConfigError, RlflameError, format_command
from rlflame.statistics import FEWEST_SEEDS, Significance
from rlflame.storage import run_reader
from rlflame.storage.run_reader import RunData

CLAIMS = ("better", "equivalent", "not-worse")


@dataclass(frozen=True)
class Evidence:
    """Of one subject, which claims hold, and the numbers that decide."""

    subject: str
    verdict: Significance
    unit: str = ""

    def has_support(self, claim: str) -> bool:
        return self.verdict.as_dict()[claim.replace("-", "_")]


@dataclass(frozen=True)
class Report:
    """The report as blocks, the same as JSON, and what a comparison has shown."""

    document: Document
    facts: dict[str, Any]
    evidence: tuple[Evidence, ...]
    notes: tuple[str, ...]


class UnsupportedClaimError(RlflameError):
    """A claim that the numbers do not carry."""


def build_report(current: Sequence[Path], baseline: Sequence[Path], margin: float) -> Report:
    """`margin` is a share. Benchmark results are .json files, runs are folders."""
    for path in (*current, *baseline):
        if (file := bench_comparison.find_results(path)) is not None:
            raise ConfigError(
                f"{path} is of a benchmark, whose results are in its .json file.",
                format_command("report", file),
            )
    tables = [path for path in (*current, *baseline) if path.suffix == ".json"]
    if not tables:
        return _build_run_report(current, baseline, margin)
    if len(current) != 1 or len(baseline) > 1 or len(tables) != len(current) + len(baseline):
        raise ConfigError(
            "Results of a benchmark are shown alone, or one beside one.",
            "rlflame report now.json --vs before.json",
        )
    return _build_bench_report(current[0], baseline, margin)


def require_claim(report: Report, claim: str) -> None:
    """A NotShown unless the claim holds of everything that was compared."""
    for evidence in report.evidence:
        if not evidence.has_support(claim):
            raise UnsupportedClaimError(
                f"Not shown: {claim.replace('-', ' ')} in {evidence.subject}. "
                f"{_format_reason(evidence, claim)}",
                "more seeds, or more repetitions, make intervals narrower",
            )


def _format_reason(evidence: Evidence, claim: str) -> str:
    verdict = evidence.verdict
    if not verdict.has_enough_seeds:
        return f"It takes {FEWEST_SEEDS} on each side."
    level, interval = ("95%", verdict.gain) if claim == "better" else ("90%", verdict.equivalence)
    bound = {
        "better": "above 0",
        "equivalent": f"within ±{verdict.margin:,.4g}{evidence.unit}",
        "not-worse": f"above -{verdict.margin:,.4g}{evidence.unit}",
    }[claim]
    return (
        f"The difference's {level} interval is [{interval.low:,.4g}, {interval.high:,.4g}]"
        f"{evidence.unit}; it would have to lie {bound}."
    )


def _build_run_report(current: Sequence[Path], baseline: Sequence[Path], margin: float) -> Report:
    runs, notes = run_reader.read_runs(list(current))
    baseline_runs, more = run_reader.read_runs(list(baseline))
    for run in (*runs, *baseline_runs):
        if not run.metrics and run.evaluation is None:
            raise RlflameError(
                f"{run.folder} has nothing to report yet.", "try again after its first iteration"
            )
    compared = compare_environments(runs, baseline_runs, margin) if baseline else []
    facts = {
        **collect_data([*runs, *baseline_runs]),
        "comparisons": [
            {"environment": name, **comparison.as_dict()} for name, comparison in compared
        ],
    }
    document = text.make_document(facts, _make_charts([*runs, *baseline_runs]), compared)
    evidence = tuple(
        Evidence(name, comparison.significance)
        for name, comparison in compared
    )  # fmt: skip
    return Report(document, facts, evidence, (*notes, *more))


def _make_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Of each environment the curves over steps and, where it was recorded, over time."""
    charts = []
    for environment in dict.fromkeys(run.environment for run in runs):
        alike = [run for run in runs if run.environment == environment]
        for axis in ("total-steps", "wall"):
            try:
                charts.append(curves.make_chart(alike, axis, _choose_metric(alike)))
            except RlflameError:
                continue  # a report without a curve is still a report
    return charts


def _choose_metric(runs: Sequence[RunData]) -> str:
    metric = curves.choose_metric(runs)
    return curves.TRAINING_RETURN if metric == curves.EPISODE_RETURN else metric


def _build_bench_report(
    current_path: Path, baseline_paths: Sequence[Path], margin: float
) -> Report:
    current = bench_comparison.read_results(current_path)
    title = f"Benchmark: {current_path.stem}"
    facts: dict[str, Any] = {
        "measurements": [{**asdict(m), "median": m.median} for m in current.measurements],
        "doubts": list(current.doubts),
    }
    if not baseline_paths:
        return Report(
            Document(title, (bench_comparison.make_results_section(current),)), facts, (), ()
        )
    baseline = bench_comparison.read_results(baseline_paths[0])
    changes = bench_comparison.compare_measurements(
        current.measurements, baseline.measurements, margin
    )
    doubts = facts["doubts"] = bench_comparison.find_doubts(current, baseline)
    facts["changes"] = [_make_fact(change) for change in changes]
    evidence = tuple(
        Evidence(change.name, change.verdict, "%")
        for change in changes
    )  # fmt: skip
    section = bench_comparison.make_comparison_section(changes, current, baseline, doubts)
    return Report(Document(title, (section,)), facts, evidence, ())


def _make_fact(change: bench_comparison.Change) -> dict[str, Any]:
    """Of fewer repetitions than an interval takes, its ends are null."""
    fact = {**asdict(change), **change.verdict.as_dict()}
    if not change.verdict.has_enough_seeds:
        for interval in ("improvement", "equivalence"):
            fact[interval] |= {"low": None, "high": None}
    return fact
