"""The numbers of a report, as JSON has them. Must not know: how they are worded or shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlflame.analysis.curves import EVALUATION
from rlflame.analysis.grouping import Group, groups
from rlflame.errors import CheckpointError, ConfigError, typed
from rlflame.rollout.spec import Float64
from rlflame.statistics import Comparison, best_mean, compare, over, summarise, tail_mean
from rlflame.storage.run_reader import Recorded

PHASES = ("collect_s", "transfer_s", "learn_s", "evaluate_s", "checkpoint_s")
Facts = dict[str, Any]


def gather(runs: Sequence[Recorded]) -> Facts:
    """`machine` and `cluster` are those of the first run; `runs` name theirs by number."""
    machines: list[Facts] = []
    clusters: list[Facts] = []
    described = []
    for run in runs:
        last = run.machines[-1] if run.machines else {}
        machine = {"rlflame": last.get("rlflame"), **(last.get("machine") or {})}
        described.append(
            _run(run, _number(machines, machine), _number(clusters, _cluster(run, last)))
        )
    return {
        "machine": machines[0],
        "cluster": clusters[0],
        "machines": machines,
        "clusters": clusters,
        "runs": described,
        "groups": [_group(group) for group in groups(runs)],
    }


def comparisons(
    ours: Sequence[Recorded], theirs: Sequence[Recorded], margin: float
) -> list[tuple[str, Comparison]]:
    """Ours beside theirs by final evaluations, environment by environment."""
    mine, other = (_by_environment(runs) for runs in (ours, theirs))
    if mine.keys() != other.keys():
        raise ConfigError(
            f"The runs are of {', '.join(mine)}, and those behind --vs of {', '.join(other)}.",
            "both sides need runs of the same environments",
        )
    return [(name, compare(_scores(mine[name]), _scores(other[name]), margin)) for name in mine]


def _by_environment(runs: Sequence[Recorded]) -> dict[str, Group]:
    found: dict[str, Group] = {}
    for group in groups(runs):
        if group.environment in found:
            raise ConfigError(
                f"The runs of {group.environment} are of more than one recipe: "
                f"{found[group.environment].label}; {group.label}.",
                "name the runs of one recipe on either side of --vs",
            )
        found[group.environment] = group
    return found


def _scores(group: Group) -> Float64:
    for run in group.runs:
        if run.evaluation is None:
            raise CheckpointError(
                f"{run.folder} has no final evaluation yet.", typed("resume", run.folder)
            )
    return np.array([(run.evaluation or {})["mean"] for run in group.runs], np.float64)


def _number(known: list[Facts], found: Facts) -> int:
    if found not in known:
        known.append(found)
    return known.index(found)


def _cluster(run: Recorded, last: Facts) -> Facts:
    workers = last.get("workers") or []
    hosts = {worker["host"] for worker in workers if "host" in worker}
    return {
        "fleet": last.get("fleet") or run.runtime.get("fleet"),
        "capacity": last.get("capacity"),
        "executors": sum(worker.get("number", 1) for worker in workers) or None,
        "nodes": len(hosts) or None,
        "workers": workers,
    }


def _run(run: Recorded, machine: int, cluster: int) -> Facts:
    return {
        "folder": str(run.folder),
        "environment": run.environment,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "init_policy": run.began_from,
        "machine": machine,
        "cluster": cluster,
        "starts": len(run.machines) or None,
        **_speed(run),
        "final": _record(run.evaluation, run.result),
        "best": _best(run),
        "unfinished": run.evaluation is None,
    }


def _speed(run: Recorded) -> Facts:
    """Of training with all that belongs to it; a phase is absent where nothing was measured."""
    wall = run.clock("wall_s")
    seconds = float(wall[1][-1]) if wall else None
    spent = None
    fleets = {machine.get("fleet") for machine in run.machines}
    if "flame" not in fleets and (cpu := run.clock("driver_cpu_s", "workers_cpu_s")):
        spent = float(cpu[1][-1])
    phases = {phase: round(sum(line.get(phase, 0.0) for line in run.timing), 3) for phase in PHASES}
    return {
        "steps": run.steps,
        "wall_s": seconds,
        "steps_per_s": run.steps / seconds if seconds else None,
        "cpu_s": spent,
        "phases": phases if wall else None,
    }


def _record(evaluation: Facts | None, result: Facts | None) -> Facts | None:
    if evaluation is None or result is None:
        return None
    kept = {name: evaluation.get(name) for name in ("mean", "low", "high", "episodes")}
    return {"steps": result["steps"], **kept}


def _best(run: Recorded) -> Facts | None:
    """The evaluation with the highest mean, final ones among them, until now."""
    found = [
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
    final = _record((run.result or {}).get("evaluation"), run.result)
    return max([*found, *([final] if final else [])], key=lambda one: one["mean"], default=None)


def _group(group: Group) -> Facts:
    """Seeds together: the final ones once all are there, the best that there are until now."""
    facts: Facts = {
        "label": group.label,
        "environment": group.environment,
        "runs": [str(run.folder) for run in group.runs],
    }
    finals = [run.evaluation["mean"] for run in group.runs if run.evaluation]
    bests = [best["mean"] for run in group.runs if (best := _best(run))]
    finished = len(finals) == len(group.runs)
    facts["unfinished"] = len(group.runs) - len(finals)
    for name, values in (("final", finals if finished else []), ("best", bests)):
        facts[name] = summarise(np.array(values, np.float64)).as_dict() if values else None
    curves = [run.values(EVALUATION) for run in group.runs]
    highest = best_mean(curves)
    facts["p2"] = highest and {"steps": highest[0], **highest[1].as_dict()}
    tails = [tail_mean(values) for _, values in curves if len(values)]
    whole = len(tails) == len(curves)
    facts["p4"] = over(np.array(tails, np.float64)).as_dict() if whole else None
    return facts
