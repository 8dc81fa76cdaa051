"""Builds reports on runs or benchmark results, and checks claims about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.analysis import curves
from rlflame.analysis.grouping import RunGroup, group_runs
from rlflame.analysis.plots.chart import Chart
from rlflame.analysis.report import bench_comparison, sections
from rlflame.analysis.report.document import Document
from rlflame.errors import CheckpointError, ConfigError, RlflameError, format_command
from rlflame.fleet.factory import is_remote
from rlflame.rollout.task import Float64
from rlflame.statistics import (
    FEWEST_SEEDS,
    Comparison,
    SeedComparison,
    compare,
    compute_mean_std,
    compute_tail_mean,
    find_best_mean,
    summarise,
)
from rlflame.storage import run_reader
from rlflame.storage.run_reader import RunData

CLAIMS = ("better", "equivalent", "not-worse")
PHASES = ("collect_s", "transfer_s", "learn_s", "evaluate_s", "checkpoint_s")
#: The fields of an evaluation, and the metrics that hold their values.
_METRICS = {
    "mean": curves.EVALUATION,
    "low": "eval_return_low",
    "high": "eval_return_high",
    "episodes": "eval_episodes",
}
Facts = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """A report as a document and as JSON data, with the verdicts of its comparisons."""

    document: Document
    facts: Facts
    #: The verdict on each comparison, by name.
    verdicts: Mapping[str, Comparison] = field(default_factory=dict)
    #: The unit of the numbers in the verdicts.
    unit: str = ""
    notes: tuple[str, ...] = ()

    def check_claim(self, claim: str) -> None:
        """Raise UnsupportedClaimError unless every comparison supports the claim."""
        for name, verdict in self.verdicts.items():
            if not verdict.verdicts[claim.replace("-", "_")]:
                level = 95 if claim == "better" else 90
                interval = verdict.difference if claim == "better" else verdict.equivalence
                raise UnsupportedClaimError(
                    f"Not shown: {claim} for {name}. The {level}% interval of the difference is "
                    f"[{interval.low:,.4g}, {interval.high:,.4g}]{self.unit}, and the margin is "
                    f"±{verdict.margin:,.4g}{self.unit}.",
                    f"use at least {FEWEST_SEEDS} seeds or repetitions on each side; more of them "
                    "make the intervals narrower",
                )


class UnsupportedClaimError(RlflameError):
    """Raised when the measured numbers do not support a claim."""


def build_report(current: Sequence[Path], baseline: Sequence[Path], margin: float) -> Report:
    """Build a report on benchmark results (.json) or on runs; `margin` is a fraction."""
    tables = [path for path in (*current, *baseline) if path.suffix == ".json"]
    if not tables:
        return _build_run_report(current, baseline, margin)
    if len(current) != 1 or len(baseline) > 1 or len(tables) != len(current) + len(baseline):
        raise ConfigError(
            "A report takes one benchmark result, or two with --vs between them.",
            "rlflame report now.json --vs before.json",
        )
    return _build_bench_report(current[0], baseline, margin)


def _build_run_report(current: Sequence[Path], baseline: Sequence[Path], margin: float) -> Report:
    runs, notes = run_reader.read_runs(list(current))
    baseline_runs, baseline_notes = run_reader.read_runs(list(baseline))
    all_runs = [*runs, *baseline_runs]
    for run in all_runs:
        if not run.metrics and run.evaluation is None:
            raise RlflameError(
                f"{run.folder} has nothing to report yet.", "try again after its first iteration"
            )
    results = _compare_environments(runs, baseline_runs, margin) if baseline else []
    comparisons = [
        {"environment": name, **asdict(result), **result.verdicts} for name, result in results
    ]
    facts = {**_describe_runs(all_runs), "comparisons": comparisons}
    document = sections.make_document(facts, _make_charts(all_runs), results)
    return Report(document, facts, dict(results), notes=(*notes, *baseline_notes))


def _build_bench_report(
    current_path: Path, baseline_paths: Sequence[Path], margin: float
) -> Report:
    current = bench_comparison.read_results(current_path)
    changes, doubts = list[bench_comparison.Change](), current.doubts
    facts: Facts = {
        "measurements": [{**asdict(m), "median": m.median} for m in current.measurements]
    }
    if baseline_paths:
        baseline = bench_comparison.read_results(baseline_paths[0])
        changes = bench_comparison.compare_measurements(
            current.measurements, baseline.measurements, margin
        )
        doubts = bench_comparison.find_doubts(current, baseline)
        facts["changes"] = [change.as_dict() for change in changes]
    section = bench_comparison.make_section(current, changes, doubts)
    return Report(
        Document(f"Benchmark: {current_path.stem}", (section,)),
        {**facts, "doubts": doubts},
        {change.current.name: change.verdict for change in changes},
        "%",
    )


def _make_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return the curves of each environment over steps and, if recorded, over time."""
    charts = []
    for environment in dict.fromkeys(run.environment for run in runs):
        group = [run for run in runs if run.environment == environment]
        metric = curves.choose_metric(group)
        metric = curves.TRAINING_RETURN if metric == curves.EPISODE_RETURN else metric
        for axis in ("total-steps", "wall"):
            try:
                charts.append(curves.make_chart(group, axis, metric))
            except RlflameError:
                continue  # the report is useful without this curve
    return charts


def _compare_environments(
    current: Sequence[RunData], baseline: Sequence[RunData], margin: float
) -> list[tuple[str, SeedComparison]]:
    """Compare final evaluations with those of the baseline, for each environment."""
    scores, baseline_scores = _read_scores(current), _read_scores(baseline)
    if scores.keys() != baseline_scores.keys():
        raise ConfigError(
            f"The runs are for {', '.join(scores)}, but those after --vs are for "
            f"{', '.join(baseline_scores)}.",
            "name runs of the same environments on both sides",
        )
    return [(name, compare(scores[name], baseline_scores[name], margin)) for name in scores]


def _read_scores(runs: Sequence[RunData]) -> dict[str, Float64]:
    """Return the final scores of all seeds, by environment."""
    groups = group_runs(runs)
    if len({group.environment for group in groups}) < len(groups):
        raise ConfigError(
            f"The runs use more than one recipe: {'; '.join(g.label for g in groups)}.",
            "name runs of one recipe on each side of --vs",
        )
    for run in runs:
        if run.evaluation is None:
            raise CheckpointError(
                f"{run.folder} has no final evaluation yet.", format_command("resume", run.folder)
            )
    return {
        group.environment: np.array(
            [run.evaluation["mean"] for run in group.runs if run.evaluation]
        )
        for group in groups
    }


def _describe_runs(runs: Sequence[RunData]) -> Facts:
    """Describe runs; each run refers to its machine and cluster by list index."""
    machines: list[Facts] = []
    clusters: list[Facts] = []
    descriptions = []
    for run in runs:
        last = run.machines[-1] if run.machines else {}
        machine = {"rlflame": last.get("rlflame"), **(last.get("machine") or {})}
        cluster = _describe_cluster(run, last)
        machines += [machine] if machine not in machines else []
        clusters += [cluster] if cluster not in clusters else []
        descriptions.append(_describe_run(run, machines.index(machine), clusters.index(cluster)))
    return {
        "machine": machines[0],
        "cluster": clusters[0],
        "machines": machines,
        "clusters": clusters,
        "runs": descriptions,
        "groups": [_describe_group(group) for group in group_runs(runs)],
    }


def _describe_cluster(run: RunData, last: Facts) -> Facts:
    workers = last.get("workers") or []
    hosts = {worker["host"] for worker in workers if "host" in worker}
    return {
        "fleet": last.get("fleet") or run.runtime.get("fleet"),
        "capacity": last.get("capacity"),
        "executors": sum(worker.get("number", 1) for worker in workers) or None,
        "nodes": len(hosts) or None,
        "workers": workers,
    }


def _describe_run(run: RunData, machine: int, cluster: int) -> Facts:
    """Describe one run. Times that were not measured are None."""
    wall, cpu = run.compute_elapsed_s("wall_s"), None
    seconds = float(wall[1][-1]) if wall else None
    if not any(is_remote(str(entry.get("fleet"))) for entry in run.machines):
        cpu = run.compute_elapsed_s("driver_cpu_s", "workers_cpu_s")
    phases = {phase: round(sum(line.get(phase, 0.0) for line in run.timing), 3) for phase in PHASES}
    return {
        "folder": str(run.folder),
        "environment": run.environment,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "init_policy": run.init_policy,
        "machine": machine,
        "cluster": cluster,
        "starts": len(run.machines) or None,
        "steps": run.steps,
        "wall_s": seconds,
        "steps_per_s": run.steps / seconds if seconds else None,
        "cpu_s": float(cpu[1][-1]) if cpu else None,
        "phases": phases if wall else None,
        "final": _describe_final(run) if run.evaluation is not None else None,
        "best": _find_best(run),
        "unfinished": run.evaluation is None,
    }


def _describe_final(run: RunData) -> Facts:
    assert run.result is not None
    evaluation = run.result["evaluation"]
    return {"steps": run.result["steps"], **{name: evaluation.get(name) for name in _METRICS}}


def _find_best(run: RunData) -> Facts | None:
    """Return the evaluation with the highest mean so far, including the final one."""
    evaluations = [
        {"steps": line["steps"], **{name: line.get(metric) for name, metric in _METRICS.items()}}
        for line in run.metrics
        if curves.EVALUATION in line
    ]
    evaluations += [_describe_final(run)] if run.result is not None else []
    return max(evaluations, key=lambda evaluation: evaluation["mean"], default=None)


def _describe_group(group: RunGroup) -> Facts:
    """Return statistics over seeds; `final` is None until all seeds are finished."""
    finals = [run.evaluation["mean"] for run in group.runs if run.evaluation]
    bests = [best["mean"] for run in group.runs if (best := _find_best(run))]
    unfinished_count = len(group.runs) - len(finals)
    evaluations = [run.read_values(curves.EVALUATION) for run in group.runs]
    highest = find_best_mean(evaluations)
    tails = [compute_tail_mean(values) for _, values in evaluations if len(values)]
    is_complete = len(tails) == len(evaluations)
    return {
        "label": group.label,
        "environment": group.environment,
        "runs": [str(run.folder) for run in group.runs],
        "unfinished": unfinished_count,
        "final": asdict(summarise(np.array(finals, np.float64))) if not unfinished_count else None,
        "best": asdict(summarise(np.array(bests, np.float64))) if bests else None,
        "p2": highest and {"steps": highest[0], **asdict(highest[1])},
        "p4": asdict(compute_mean_std(np.array(tails, np.float64))) if is_complete else None,
    }
