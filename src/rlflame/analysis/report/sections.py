"""Makes the sections of a report on runs, such as returns and machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflame.analysis.plots.chart import Chart
from rlflame.analysis.report.document import Block, Document, Section, make_table
from rlflame.fleet.factory import get_worker_noun, has_workers, is_remote
from rlflame.statistics import FEWEST_SEEDS, Interval, SeedComparison
from rlflame.terminal_text import format_count, format_size

Facts = Mapping[str, Any]
_VERSIONS = ("rlflame", "python", "numpy", "gymnasium", "mujoco", "box2d", "torch")
_GROUPS = (
    ("recipe", "label", ""),
    "environment",
    ("seeds", "times", ""),
    ("IQM [95% interval]", "iqm", ",.1f"),
    ("mean", "mean", ",.1f"),
    ("std", "std", ",.1f"),
    ("worst seed", "worst", ",.1f"),
    *(("P2", "p2", ""), ("P4", "p4", "")),
    ("IQM of best evaluations", "best_iqm", ",.1f"),
)
_RUNS = (
    ("run", "folder", ""),
    "seed",
    ("final", "final", ",.1f"),
    ("episodes", "episodes", ","),
    ("best", "best", ",.1f"),
    ("at step", "best_step", ","),
)
_COMPARISONS = (
    "environment",
    "seeds",
    ("difference of IQMs", "difference", ",.1f"),
    ("90% interval", "equivalence", ",.1f"),
    ("margin", "margin", ",.1f"),
    ("probability of improvement", "probability", ".2f"),
    "verdict",
)
_SPEEDS = (
    ("run", "folder", ""),
    ("rollouts on", "fleet", ""),
    ("machine", "machine_number", ""),
    ("steps", "steps", ","),
    ("time, s", "wall_s", ",.1f"),
    ("steps/s", "steps_per_s", ",.0f"),
    *((phase, phase, ".0%") for phase in ("collect", "learn", "evaluate")),
    ("processor time, s", "cpu_s", ",.1f"),
)
_MACHINES = (
    ("machine", "name", ""),
    *("number", "processor", "blas"),
    ("cores", "usable_cores", ""),
    *("memory", "system", "versions"),
)


def make_document(
    facts: Facts, charts: Sequence[Chart], comparisons: Sequence[tuple[str, SeedComparison]] = ()
) -> Document:
    environments = dict.fromkeys(run["environment"] for run in facts["runs"])
    sections = {
        "Returns": _make_reward_blocks(facts),
        "Comparison": _make_comparison_blocks(comparisons) if comparisons else [],
        "Throughput": _make_throughput_blocks(facts),
        "Curves": charts,
        "Machines": _make_machine_blocks(facts),
    }
    return Document(
        f"Report: {', '.join(environments)}",
        tuple(Section(title, tuple(blocks)) for title, blocks in sections.items() if blocks),
    )


def _make_reward_blocks(facts: Facts) -> list[Block]:
    runs = [
        {
            **run,
            "final": "unfinished" if run["unfinished"] else _make_interval(run["final"]),
            "episodes": run["final"] and run["final"]["episodes"],
            "best": _make_interval(run["best"]),
            "best_step": run["best"] and run["best"]["steps"],
        }
        for run in facts["runs"]
    ]
    return [
        "Returns of the final policy without exploration. The interval is from a stratified "
        f"bootstrap and needs at least {FEWEST_SEEDS} seeds. P2 is the highest mean over seeds of "
        "any evaluation during training, P4 the mean of the last 5% of these evaluations, each "
        "with its standard deviation.",
        make_table([*map(_make_group_row, facts["groups"])], _GROUPS, 2),
        "Each run, with 95% bootstrap intervals over episodes. The best evaluation of a run is "
        "selected after the fact, so it is biased upwards.",
        make_table(runs, _RUNS),
    ]


def _make_interval(record: Facts | None) -> Interval | None:
    return Interval(record["mean"], record["low"], record["high"]) if record else None


def _make_group_row(group: Facts) -> Facts:
    """Return the table row of a group; `best_iqm` covers the seeds evaluated so far."""
    seeds, final, best = len(group["runs"]), group["final"] or {}, group["best"]
    return {
        **group,
        **final,
        "times": seeds,
        "iqm": Interval(**final["iqm"])
        if final
        else f"{seeds - group['unfinished']} of {seeds} finished",
        "std": final["std"] if final and seeds > 1 else None,
        "p2": _format_mean_std(group["p2"]),
        "p4": _format_mean_std(group["p4"]),
        "best_iqm": best and best["iqm"]["value"],
    }


def _format_mean_std(statistic: Facts | None) -> str | None:
    return f"{statistic['mean']:,.1f} ({statistic['std']:,.1f})" if statistic else None


def _make_comparison_blocks(comparisons: Sequence[tuple[str, SeedComparison]]) -> list[Block]:
    rows = [
        {
            "environment": name,
            "seeds": f"{result.seeds[0]} / {result.seeds[1]}",
            "difference": result.difference,
            "equivalence": result.equivalence,
            "margin": result.margin,
            "probability": result.probability_of_improvement,
            "verdict": format_verdict(result),
        }
        for name, result in comparisons
    ]
    return [
        "Final evaluations of these runs minus those after --vs, with 95% bootstrap intervals. "
        "Better: the difference's 95% interval lies above 0. Equivalent: its 90% interval lies "
        "within the margin (two one-sided tests at 5%). Not worse: it lies above minus the margin.",
        make_table(rows, _COMPARISONS),
    ]


def format_verdict(result: SeedComparison) -> str:
    if not result.has_enough_seeds:
        return f"unknown with fewer than {FEWEST_SEEDS} seeds"
    words = [name.replace("_", " ") for name, holds in result.verdicts.items() if holds]
    return ", ".join(words) or ("worse" if result.difference.high < 0.0 else "undecided")


def _make_throughput_blocks(facts: Facts) -> list[Block]:
    rows = [
        {
            **run,
            "fleet": _format_fleet(facts["clusters"][run["cluster"]]),
            "machine_number": run["machine"] + 1,
            **{
                phase: run["phases"][f"{phase}_s"] / run["wall_s"]
                for phase in ("collect", "learn", "evaluate")
                if run["wall_s"]
            },
        }
        for run in facts["runs"]
    ]
    return [
        "Time includes all evaluations and checkpoints. "
        "Collect is the time spent waiting for rollouts. Speeds on different machines, or on a "
        "machine that was busy, are not comparable.",
        make_table(rows, _SPEEDS, 2),
    ]


def _format_fleet(cluster: Facts) -> str:
    fleet, capacity = cluster["fleet"], cluster["capacity"]
    if not has_workers(fleet):
        return "one process"
    noun = get_worker_noun(fleet)
    text = f"{fleet}, {format_count(capacity, noun)}" if capacity else str(fleet or "-")
    return text + (f" on {format_count(cluster['nodes'], 'node')}" if cluster["nodes"] else "")


def _make_machine_blocks(facts: Facts) -> list[Block]:
    """Return a table of machines: drivers by number, and executors by host name."""
    rows = [
        {**machine, **(machine.get("packages") or {}), "name": str(number)}
        for number, machine in enumerate(facts["machines"], 1)
    ]
    rows += [
        {**worker, "name": worker.get("host"), "processor": worker.get("core")}
        for cluster in facts["clusters"]
        if is_remote(cluster["fleet"])
        for worker in cluster["workers"]
    ]
    for row in rows:
        memory = row.get("memory_bytes")
        row["memory"] = None if memory is None else format_size(memory)
        row["versions"] = ", ".join(f"{n} {row[n]}" for n in _VERSIONS if row.get(n))
    return [make_table(rows, _MACHINES, len(_MACHINES))]
