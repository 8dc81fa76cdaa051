"""From the numbers of a report to its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflame.analysis.plots.chart import Chart
from rlflame.analysis.report.document import Block, Commands, Document, Section, make_table
from rlflame.errors import format_command
from rlflame.fleet.factory import get_worker_noun, has_workers, is_remote
from rlflame.statistics import FEWEST_SEEDS, SeedComparison
from rlflame.terminal_text import format_count, format_duration

Facts = Mapping[str, Any]
NOTHING = "-"
_PACKAGES = ("numpy", "gymnasium", "mujoco", "box2d", "torch")


def make_document(
    facts: Facts, charts: Sequence[Chart], comparisons: Sequence[tuple[str, SeedComparison]] = ()
) -> Document:
    environments = dict.fromkeys(run["environment"] for run in facts["runs"])
    sections = {
        "What ran": _make_run_blocks(facts),
        "Reward": _make_reward_blocks(facts),
        "Compared": _make_comparison_blocks(comparisons) if comparisons else [],
        "Throughput": _make_throughput_blocks(facts),
        "Curves": charts,
        "Machines": _make_machine_blocks(facts),
        "Again": _make_reproduction_blocks(facts["runs"]),
    }
    return Document(
        f"Report: {', '.join(environments)}",
        tuple(Section(title, tuple(blocks)) for title, blocks in sections.items() if blocks),
    )


def _make_comparison_blocks(comparisons: Sequence[tuple[str, SeedComparison]]) -> list[Block]:
    rows = [
        {
            "environment": name,
            "seeds": f"{result.seeds[0]} / {result.seeds[1]}",
            "difference of IQMs": _format_interval(result.difference.as_dict()),
            "its 90%": f"[{format_number(result.equivalence.low)}, "
            f"{format_number(result.equivalence.high)}]",
            "margin": f"±{format_number(result.margin)}",
            "probability of improvement": _format_interval(
                result.probability_of_improvement.as_dict(), 2
            ),
            "verdict": format_verdict(result),
        }
        for name, result in comparisons
    ]
    return [
        "Final evaluations of these runs minus those behind --vs; 95% bootstrap intervals. "
        "Better: the difference's 95% interval lies above 0. Equivalent: its 90% interval lies "
        "within the margin (two one-sided tests at 5%). Not worse: it lies above minus the margin.",
        make_table(rows),
    ]


def format_verdict(result: SeedComparison) -> str:
    decision = result.significance
    if not decision.has_enough_seeds:
        return f"fewer than {FEWEST_SEEDS} seeds show nothing"
    verdicts = {
        "better": decision.better,
        "worse": result.difference.high < 0.0,
        "equivalent": decision.equivalent,
        "not worse": decision.not_worse and not decision.better and not decision.equivalent,
    }
    return ", ".join(word for word, holds in verdicts.items() if holds) or "undecided"


def format_number(value: Any, places: int = 1) -> str:
    return f"{value:,.{places}f}" if isinstance(value, int | float) else NOTHING


def _format_interval(interval: Facts, places: int = 1) -> str:
    value, low, high = (format_number(interval[name], places) for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _make_run_blocks(facts: Facts) -> list[Block]:
    by_folder = {run["folder"]: run for run in facts["runs"]}
    rows = []
    for group in facts["groups"]:
        runs = [by_folder[folder] for folder in group["runs"]]
        steps = sorted({run["steps"] for run in runs})
        fleets = dict.fromkeys(_format_fleet(facts["clusters"][run["cluster"]]) for run in runs)
        rows.append(
            {
                "recipe": group["label"],
                "environment": group["environment"],
                "seeds": ", ".join(str(run["seed"]) for run in runs),
                "steps": f"{steps[0]:,}" + (f" to {steps[-1]:,}" if len(steps) > 1 else ""),
                "rollouts on": "; ".join(fleets),
            }
        )
    return [make_table(rows, words=5)]


def _format_fleet(cluster: Facts) -> str:
    fleet, capacity = cluster["fleet"], cluster["capacity"]
    if not has_workers(fleet):
        return "one process"
    noun = get_worker_noun(fleet)
    text = f"{fleet}, {format_count(capacity, noun)}" if capacity else str(fleet or NOTHING)
    return text + (f" on {format_count(cluster['nodes'], 'node')}" if cluster["nodes"] else "")


def _make_reward_blocks(facts: Facts) -> list[Block]:
    run_rows = [
        {
            "run": run["folder"],
            "seed": str(run["seed"]),
            "final": "unfinished" if run["unfinished"] else _format_evaluation(run["final"]),
            "episodes": format_number(run["final"] and run["final"]["episodes"], 0),
            "best": _format_evaluation(run["best"]),
            "at step": format_number(run["best"] and run["best"]["steps"], 0),
        }
        for run in facts["runs"]
    ]
    few = any(len(group["runs"]) < FEWEST_SEEDS for group in facts["groups"])
    return [
        "Returns of the final policy without exploration; the interval is a stratified bootstrap "
        "over seeds. P2 is the best mean over seeds that any evaluation in training had, P4 the "
        "mean of the last 5% of these evaluations."
        + (" Fewer than three seeds tell little of the next one." if few else ""),
        make_table([*map(_make_group_row, facts["groups"])]),
        "Each run, with 95% bootstrap intervals over episodes. The best is chosen after the fact "
        "from all of a run's evaluations, and so is too good on average.",
        make_table(run_rows),
    ]


def _make_group_row(group: Facts) -> dict[str, str]:
    """Of unfinished seeds, the best until now of those that have been evaluated at all."""
    seeds, final, best = len(group["runs"]), group["final"], group["best"]
    best_text = format_number(best["iqm"]["value"]) if best else NOTHING
    if final is not None:
        iqm = final["iqm"]
        status = _format_interval(iqm) if seeds > 1 else format_number(iqm["value"])
    else:
        finished = seeds - group["unfinished"]
        status = f"{finished} of {seeds} finished" if finished else "unfinished"
        if best is not None:
            of = f" of {format_count(best['seeds'], 'seed')}" if best["seeds"] < seeds else ""
            best_text += f" so far{of}"
    means = [group[name] if final is not None else None for name in ("final", "p2", "p4")]
    mean, p2, p4 = (_format_mean_std(statistic, seeds) for statistic in means)
    return {
        "recipe": group["label"],
        "seeds": str(seeds),
        "IQM [95% interval]": status,
        "mean ± std": mean,
        "worst seed": format_number(final and final["worst"]),
        "P2": p2,
        "P4": p4,
        "IQM of the best": best_text,
    }


def _format_mean_std(statistic: Facts | None, seeds: int) -> str:
    """A mean over seeds and how far they scatter."""
    if statistic is None:
        return NOTHING
    mean, std = (format_number(statistic[name]) for name in ("mean", "std"))
    return f"{mean} ± {std}" if seeds > 1 else mean


def _format_evaluation(record: Facts | None) -> str:
    return _format_interval({**record, "value": record["mean"]}) if record else NOTHING


def _make_throughput_blocks(facts: Facts) -> list[Block]:
    rows = [
        {
            "run": run["folder"],
            "steps": f"{run['steps']:,}",
            "time": _format_time(run["wall_s"]),
            "steps/s": format_number(run["steps_per_s"], 0),
            **{
                phase: f"{run['phases'][f'{phase}_s'] / run['wall_s']:.0%}"
                if run["wall_s"]
                else NOTHING
                for phase in ("collect", "learn", "evaluate")
            },
            "processor time": _format_time(run["cpu_s"]),
            "rollouts on": _format_fleet(facts["clusters"][run["cluster"]]),
            "machine": str(run["machine"] + 1),
        }
        for run in facts["runs"]
    ]
    return [
        "Time counts evaluations and checkpoints during training, and not the final evaluation. "
        "Collect is the time spent waiting for rollouts. Speeds of different machines, or beside "
        "other work, are not to be compared.",
        make_table(rows),
    ]


def _format_time(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return format_duration(seconds) if seconds >= 60.0 else f"{seconds:.1f} s"


def _make_machine_blocks(facts: Facts) -> list[Block]:
    rows = [_make_machine_row(*entry) for entry in enumerate(facts["machines"], 1)]
    executors = [
        {
            "host": str(worker.get("host", NOTHING)),
            "number": str(worker.get("number", 1)),
            "processor": str(worker.get("core", NOTHING)),
            "versions": _format_versions(worker, "python"),
        }
        for cluster in facts["clusters"]
        if is_remote(cluster["fleet"])
        for worker in cluster["workers"]
    ]
    blocks: list[Block] = [make_table(rows, words=6)]
    if executors:
        blocks += ["Executors:", make_table(executors, words=4)]
    return blocks


def _make_machine_row(number: int, machine: Facts) -> dict[str, str]:
    packages = machine.get("packages") or {}
    versions = {**packages, "Python": machine.get("python"), "rlflame": machine.get("rlflame")}
    blas = f" ({machine['blas']})" if "blas" in machine else ""
    cores = [str(machine.get(name, NOTHING)) for name in ("usable_cores", "cores")]
    memory = machine.get("memory_bytes")
    return {
        "": str(number),
        "processor (as the linear algebra sees it)": f"{machine.get('processor', NOTHING)}{blas}",
        "cores used": " of ".join(cores) if {*cores} != {NOTHING} else NOTHING,
        "memory": NOTHING if memory is None else f"{memory / (1 << 30):.1f} GiB",
        "system": machine.get("system", NOTHING),
        "versions": _format_versions(versions, "rlflame", "Python") or NOTHING,
    }


def _format_versions(versions: Facts, *names: str) -> str:
    return ", ".join(f"{n} {versions[n]}" for n in (*names, *_PACKAGES) if versions.get(n))


def _make_reproduction_blocks(runs: Sequence[Facts]) -> list[Block]:
    lines = tuple(
        format_command("train", "--config", f"{run['folder']}/config.toml")
        + (" --init-from FILE" if run["init_policy"] else "")
        for run in runs
    )
    blocks: list[Block] = [
        "Equal recipes end in equal weights on machines with equal fingerprints; a new folder "
        "beside the old one takes them."
    ]
    if any(run["init_policy"] for run in runs):
        blocks.append("FILE is the policy that the run started from; another one is refused.")
    return [*blocks, Commands(lines)]
