"""The numbers of a report, as JSON has them. Must not know: how they are worded or shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlflame.analysis.curves import EVALUATION
from rlflame.analysis.grouping import RunGroup, group_runs
from rlflame.errors import CheckpointError, ConfigError, format_command
from rlflame.rollout.spec import Float64
from rlflame.statistics import (
    SeedComparison,
    compare,
    compute_mean_std,
    compute_tail_mean,
    find_best_mean,
    summarise,
)
from rlflame.storage.run_reader import RunData

PHASES = ("collect_s", "transfer_s", "learn_s", "evaluate_s", "checkpoint_s")
Facts = dict[str, Any]


def collect_data(runs: Sequence[RunData]) -> Facts:
    """`machine` and `cluster` are those of the first run; `runs` name theirs by number."""
    machines: list[Facts] = []
    clusters: list[Facts] = []
    described = []
    for run in runs:
        last = run.machines[-1] if run.machines else {}
        machine = {"rlflame": last.get("rlflame"), **(last.get("machine") or {})}
        described.append(
            _describe_run(
                run,
                _find_number(machines, machine),
                _find_number(clusters, _describe_cluster(run, last)),
            )
        )
    return {
        "machine": machines[0],
        "cluster": clusters[0],
        "machines": machines,
        "clusters": clusters,
        "runs": described,
        "groups": [_describe_group(group) for group in group_runs(runs)],
    }


def compare_environments(
    current: Sequence[RunData], baseline: Sequence[RunData], margin: float
) -> list[tuple[str, SeedComparison]]:
    """Ours beside theirs by final evaluations, environment by environment."""
    current_groups, baseline_groups = (_group_by_environment(runs) for runs in (current, baseline))
    if current_groups.keys() != baseline_groups.keys():
        raise ConfigError(
            f"The runs are of {', '.join(current_groups)}, and those behind --vs of "
            f"{', '.join(baseline_groups)}.",
            "both sides need runs of the same environments",
        )
    return [
        (
            name,
            compare(
                _read_scores(current_groups[name]), _read_scores(baseline_groups[name]), margin
            ),
        )
        for name in current_groups
    ]


def _group_by_environment(runs: Sequence[RunData]) -> dict[str, RunGroup]:
    groups_by_name: dict[str, RunGroup] = {}
    for group in group_runs(runs):
        if group.environment in groups_by_name:
            raise ConfigError(
                f"The runs of {group.environment} are of more than one recipe: "
                f"{groups_by_name[group.environment].label}; {group.label}.",
                "name the runs of one recipe on either side of --vs",
            )
        groups_by_name[group.environment] = group
    return groups_by_name


def _read_scores(group: RunGroup) -> Float64:
    for run in group.runs:
        if run.evaluation is None:
            raise CheckpointError(
                f"{run.folder} has no final evaluation yet.", format_command("resume", run.folder)
            )
    return np.array([(run.evaluation or {})["mean"] for run in group.runs], np.float64)


def _find_number(entries: list[Facts], entry: Facts) -> int:
    if entry not in entries:
        entries.append(entry)
    return entries.index(entry)


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
    return {
        "folder": str(run.folder),
        "environment": run.environment,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "init_policy": run.init_policy,
        "machine": machine,
        "cluster": cluster,
        "starts": len(run.machines) or None,
        **_describe_speed(run),
        "final": _describe_evaluation(run.evaluation, run.result),
        "best": _find_best(run),
        "unfinished": run.evaluation is None,
    }


def _describe_speed(run: RunData) -> Facts:
    """Of training with all that belongs to it; a phase is absent where nothing was measured."""
    wall = run.compute_elapsed_s("wall_s")
    seconds = float(wall[1][-1]) if wall else None
    spent = None
    fleets = {machine.get("fleet") for machine in run.machines}
    if "flame" not in fleets and (cpu := run.compute_elapsed_s("driver_cpu_s", "workers_cpu_s")):
        spent = float(cpu[1][-1])
    phases = {phase: round(sum(line.get(phase, 0.0) for line in run.timing), 3) for phase in PHASES}
    return {
        "steps": run.steps,
        "wall_s": seconds,
        "steps_per_s": run.steps / seconds if seconds else None,
        "cpu_s": spent,
        "phases": phases if wall else None,
    }


def _describe_evaluation(evaluation: Facts | None, result: Facts | None) -> Facts | None:
    if evaluation is None or result is None:
        return None
    scores = {name: evaluation.get(name) for name in ("mean", "low", "high", "episodes")}
    return {"steps": result["steps"], **scores}


def _find_best(run: RunData) -> Facts | None:
    """The evaluation with the highest mean, final ones among them, until now."""
    evaluations = [
        {
            "steps": line["steps"],
            "mean": line[EVALUATION],
            "low": line.get("eval_return_low"),
            "high": line.get("eval_return_high"),
            "episodes": line.get("eval_episodes"),
        }
        for line in run.metrics
        if EVALUATION in line
    ]
    final = _describe_evaluation((run.result or {}).get("evaluation"), run.result)
    return max(
        [*evaluations, *([final] if final else [])],
        key=lambda evaluation: evaluation["mean"],
        default=None,
    )


def _describe_group(group: RunGroup) -> Facts:
    """Seeds together: the final ones once all are there, the best that there are until now."""
    facts: Facts = {
        "label": group.label,
        "environment": group.environment,
        "runs": [str(run.folder) for run in group.runs],
    }
    finals = [run.evaluation["mean"] for run in group.runs if run.evaluation]
    bests = [best["mean"] for run in group.runs if (best := _find_best(run))]
    finished = len(finals) == len(group.runs)
    facts["unfinished"] = len(group.runs) - len(finals)
    for name, values in (("final", finals if finished else []), ("best", bests)):
        facts[name] = summarise(np.array(values, np.float64)).as_dict() if values else None
    curves = [run.read_values(EVALUATION) for run in group.runs]
    highest = find_best_mean(curves)
    facts["p2"] = highest and {"steps": highest[0], **highest[1].as_dict()}
    tails = [compute_tail_mean(values) for _, values in curves if len(values)]
    is_complete = len(tails) == len(curves)
    facts["p4"] = compute_mean_std(np.array(tails, np.float64)).as_dict() if is_complete else None
    return facts
