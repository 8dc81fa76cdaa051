"""From the numbers of a report to its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflame.analysis.plots.chart import Chart
from rlflame.analysis.report.document import Block, Commands, Document, Section, Table
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
    environments = list(dict.fromkeys(run["environment"] for run in facts["runs"]))
    sections = [
        Section("What ran", tuple(_make_run_blocks(facts))),
        Section("Reward", tuple(_make_reward_blocks(facts))),
        *([make_comparison_section(comparisons)] if comparisons else []),
        Section("Throughput", tuple(_make_throughput_blocks(facts))),
        *([Section("Curves", tuple(charts))] if charts else []),
        Section("Machines", tuple(_make_machine_blocks(facts))),
        Section("Again", tuple(_make_reproduction_blocks(facts))),
    ]
    return Document(f"Report: {', '.join(environments)}", tuple(sections))


def make_comparison_section(comparisons: Sequence[tuple[str, SeedComparison]]) -> Section:
    rows = tuple(
        (
            name,
            f"{result.seeds[0]} / {result.seeds[1]}",
            _format_interval(result.difference.as_dict()),
            f"[{format_number(result.equivalence.low)}, {format_number(result.equivalence.high)}]",
            f"±{format_number(result.margin)}",
            _format_interval(result.probability_of_improvement.as_dict(), 2),
            format_verdict(result),
        )
        for name, result in comparisons
    )
    head = ("environment", "seeds", "difference of IQMs", "its 90%", "margin",
            "probability of improvement", "verdict")  # fmt: skip
    return Section(
        "Compared",
        (
            "Final evaluations of these runs minus those behind --vs; 95% bootstrap intervals. "
            "Better: the difference's 95% interval lies above 0. Equivalent: its 90% interval lies "
            "within the margin (two one-sided tests at 5%). Not worse: it lies above minus the "
            "margin.",
            Table(head, rows),
        ),
    )


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
    ends = f"[{format_number(interval['low'], places)}, {format_number(interval['high'], places)}]"
    return f"{format_number(interval['value'], places)} {ends}"


def _make_run_blocks(facts: Facts) -> list[Block]:
    by_folder = {run["folder"]: run for run in facts["runs"]}
    rows = []
    for group in facts["groups"]:
        runs = [by_folder[folder] for folder in group["runs"]]
        seeds = ", ".join(str(run["seed"]) for run in runs)
        steps = sorted({run["steps"] for run in runs})
        span = f"{steps[0]:,}" + (f" to {steps[-1]:,}" if len(steps) > 1 else "")
        fleets = dict.fromkeys(_format_fleet(facts["clusters"][run["cluster"]]) for run in runs)
        rows.append((group["label"], group["environment"], seeds, span, "; ".join(fleets)))
    return [Table(("recipe", "environment", "seeds", "steps", "rollouts on"), tuple(rows), 5)]


def _format_fleet(cluster: Facts) -> str:
    fleet, capacity = cluster["fleet"], cluster["capacity"]
    if not has_workers(fleet):
        return "one process"
    noun = get_worker_noun(fleet)
    text = f"{fleet}, {format_count(capacity, noun)}" if capacity else str(fleet or NOTHING)
    return text + (f" on {format_count(cluster['nodes'], 'node')}" if cluster["nodes"] else "")


def _format_mean_std(statistic: Facts | None, seeds: int) -> str:
    """A mean over seeds and how far they scatter."""
    if statistic is None:
        return NOTHING
    mean, std = (format_number(statistic[name]) for name in ("mean", "std"))
    return f"{mean} ± {std}" if seeds > 1 else mean


def _make_reward_blocks(facts: Facts) -> list[Block]:
    head = ("recipe", "seeds", "IQM [95% interval]", "mean ± std", "worst seed",
            "P2", "P4", "IQM of the best")  # fmt: skip
    rows = tuple(map(_make_group_row, facts["groups"]))
    run_rows = tuple(
        (run["folder"], str(run["seed"]),
         "unfinished" if run["unfinished"] else _format_evaluation(run["final"]),
         _format_episodes(run["final"]),
         _format_evaluation(run["best"]), f"{run['best']['steps']:,}" if run["best"] else NOTHING)
        for run in facts["runs"]
    )  # fmt: skip
    few = any(len(group["runs"]) < FEWEST_SEEDS for group in facts["groups"])
    return [
        "Returns of the final policy without exploration; the interval is a stratified bootstrap "
        "over seeds. P2 is the best mean over seeds that any evaluation in training had, P4 the "
        "mean of the last 5% of these evaluations."
        + (" Fewer than three seeds tell little of the next one." if few else ""),
        Table(head, rows),
        "Each run, with 95% bootstrap intervals over episodes. The best is chosen after the fact "
        "from all of a run's evaluations, and so is too good on average.",
        Table(("run", "seed", "final", "episodes", "best", "at step"), run_rows),
    ]


def _make_group_row(group: Facts) -> tuple[str, ...]:
    """Of unfinished seeds, the best until now of those that have been evaluated at all."""
    seeds, final, best = len(group["runs"]), group["final"], group["best"]
    best_text = format_number(best["iqm"]["value"]) if best else NOTHING
    if final is None:
        finished = seeds - group["unfinished"]
        status = f"{finished} of {seeds} finished" if finished else "unfinished"
        if best is not None:
            of = f" of {format_count(best['seeds'], 'seed')}" if best["seeds"] < seeds else ""
            best_text += f" so far{of}"
        return (group["label"], str(seeds), status, *[NOTHING] * 4, best_text)
    iqm = final["iqm"]
    return (
        group["label"],
        str(seeds),
        _format_interval(iqm) if seeds > 1 else format_number(iqm["value"]),
        _format_mean_std(final, seeds),
        format_number(final["worst"]),
        *(_format_mean_std(group[name], seeds) for name in ("p2", "p4")),
        best_text,
    )


def _format_evaluation(record: Facts | None) -> str:
    if record is None:
        return NOTHING
    return _format_interval({"value": record["mean"], "low": record["low"], "high": record["high"]})


def _format_episodes(record: Facts | None) -> str:
    return format_number(record["episodes"], 0) if record else NOTHING


def _make_throughput_blocks(facts: Facts) -> list[Block]:
    head = ("run", "steps", "time", "steps/s", "collect", "learn", "evaluate", "processor time",
            "rollouts on", "machine")  # fmt: skip
    rows = []
    for run in facts["runs"]:
        wall, phases = run["wall_s"], run["phases"]
        shares = [
            f"{100.0 * phases[name] / wall:.0f}%" if wall else NOTHING
            for name in ("collect_s", "learn_s", "evaluate_s")
        ]
        rows.append(
            (
                run["folder"],
                f"{run['steps']:,}",
                _format_time(wall),
                format_number(run["steps_per_s"], 0),
                *shares,
                _format_time(run["cpu_s"]),
                _format_fleet(facts["clusters"][run["cluster"]]),
                str(run["machine"] + 1),
            )
        )
    return [
        "Time counts evaluations and checkpoints during training, and not the final evaluation. "
        "Collect is the time spent waiting for rollouts. Speeds of different machines, or beside "
        "other work, are not to be compared.",
        Table(head, tuple(rows)),
    ]


def _format_time(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return format_duration(seconds) if seconds >= 60.0 else f"{seconds:.1f} s"


def _make_machine_blocks(facts: Facts) -> list[Block]:
    rows = []
    for place, machine in enumerate(facts["machines"], 1):
        versions = {**(machine.get("packages") or {}), "Python": machine.get("python")}
        versions["rlflame"] = machine.get("rlflame")
        blas = f" ({machine['blas']})" if "blas" in machine else ""
        cores = [str(machine.get(name, NOTHING)) for name in ("usable_cores", "cores")]
        memory = machine.get("memory_bytes")
        rows.append(
            (
                str(place),
                f"{machine.get('processor', NOTHING)}{blas}",
                " of ".join(cores) if {*cores} != {NOTHING} else NOTHING,
                NOTHING if memory is None else f"{memory / (1 << 30):.1f} GiB",
                machine.get("system", NOTHING),
                _format_versions(versions, "rlflame", "Python") or NOTHING,
            )
        )
    head = ("", "processor (as the linear algebra sees it)", "cores used", "memory", "system",
            "versions")  # fmt: skip
    blocks: list[Block] = [Table(head, tuple(rows), 6)]
    executors = tuple(
        (
            str(worker.get("host", NOTHING)),
            str(worker.get("number", 1)),
            str(worker.get("core", NOTHING)),
            _format_versions(worker, "python"),
        )
        for cluster in facts["clusters"]
        if is_remote(cluster["fleet"])
        for worker in cluster["workers"]
    )
    if executors:
        blocks += ["Executors:", Table(("host", "number", "processor", "versions"), executors, 4)]
    return blocks


def _format_versions(versions: Facts, *names: str) -> str:
    return ", ".join(f"{n} {versions[n]}" for n in (*names, *_PACKAGES) if versions.get(n))


def _make_reproduction_blocks(facts: Facts) -> list[Block]:
    runs = facts["runs"]
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
