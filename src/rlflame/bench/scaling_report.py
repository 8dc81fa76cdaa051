"""A scaling benchmark in words and tables. Must not know: how it was timed, where it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.analysis.report.document import Block, Document, Section, Table
from rlflame.bench import advice
from rlflame.bench.base import Case, Cell, MachineConditions
from rlflame.bench.published import SPEEDUPS, PublishedComparison, find_benefit
from rlflame.bench.scaling_model import (
    FleetOverhead,
    ScalingRow,
    compute_gains,
    fit_overheads,
    has_same_bits,
    make_rows,
)
from rlflame.statistics import FEWEST_SEEDS, Interval
from rlflame.terminal_text import format_count, format_size

NOTHING = "-"


@dataclass(frozen=True)
class ScalingResult:
    """All that a scaling benchmark has seen."""

    cases: Sequence[Case]
    cells: Sequence[Cell]
    conditions: MachineConditions
    complete: bool
    published: PublishedComparison | None = None

    @property
    def rows(self) -> list[ScalingRow]:
        return make_rows(self.cases, self.cells)

    @property
    def overheads(self) -> list[FleetOverhead]:
        return fit_overheads(self.cases, self.cells)

    def make_advice(self) -> list[str]:
        cores = int(self.conditions.machine["usable_cores"])
        return advice.make_sentences(self.cases, self.rows, self.overheads, cores)


def make_document(result: ScalingResult) -> Document:
    sections = [
        Section("Speed-up", tuple(_make_speedup_blocks(result))),
        Section("Where the time goes", tuple(_make_loss_blocks(result))),
    ]
    if fleet_gains := compute_gains(result.cells):
        sections.append(
            Section("Flame beside this machine", tuple(_make_gain_blocks(result, fleet_gains)))
        )
    if result.published is not None:
        sections.append(Section("Beside what was published", tuple(_make_published_blocks(result))))
    sections += [
        Section("What to do", tuple(result.make_advice())),
        Section("Measured on", tuple(format_conditions(result.conditions, result.complete))),
    ]
    return Document("Benchmark: scaling", tuple(sections))


def _make_speedup_blocks(result: ScalingResult) -> list[Block]:
    quoted = any(row.cell.workers in SPEEDUPS for row in result.rows)
    head: tuple[str, ...] = ("case", "fleet", "workers", "times", "seconds", "steps/s")
    head += ("theoretical", "speed-up", "efficiency")
    body = tuple(
        (
            row.cell.case,
            row.cell.fleet,
            str(row.cell.workers),
            str(len(row.cell.repetitions)),
            format_interval(row.seconds, len(row.cell.repetitions), 3),
            f"{row.cell.repetitions[0].steps / row.seconds.value:,.0f}",
            f"{row.theoretical:.2f}x",
            format_interval(row.speedup, len(row.cell.repetitions), 2, "x"),
            f"{row.efficiency:.2f}",
            *([SPEEDUPS.get(row.cell.workers, NOTHING)] if quoted else []),
        )
        for row in result.rows
    )
    if quoted:
        head = (*head, "Flame's README")
    return [
        "The same work on every side, collecting and learning, through the one loop that trains; "
        "warm-up apart; medians with 95% bootstrap intervals from "
        f"{FEWEST_SEEDS} repetitions on. One is the fastest with the fewest workers; theoretical "
        "is what so many tasks allow on so many workers.",
        Table(head, body, 2),
        _format_tasks(result.cases),
        *format_bits(
            [has_same_bits(result.cells, case.name) for case in result.cases],
            "Every side learned the same weights, to the last bit.",
            "The sides did not learn the same weights.",
            elsewhere=any(cell.fleet == "flame" for cell in result.cells),
        ),
        *_format_missing_workers(result.cells),
        *format_retried({cell.name: cell.retried for cell in result.cells}),
    ]


def format_bits(
    results: Sequence[bool | None], same: str, different: str, *, elsewhere: bool = False
) -> list[str]:
    """A sentence on what was compared, and none where nothing was."""
    values = [value for value in results if value is not None]
    if not values:
        return []
    if all(values):
        return [same]
    return [different + " Executors on other machines may be why." * elsewhere]


def format_retried(retried_by_name: Mapping[str, Sequence[int]]) -> list[str]:
    """A sentence on repetitions, by name, in which tasks went to a second worker."""
    which = [
        f"{name}, {number} of {len(counts)} ({format_count(tasks, 'task')})"
        for name, counts in retried_by_name.items()
        for number, tasks in enumerate(counts, 1)
        if tasks
    ]
    if not which:
        return []
    return [
        "Workers were lost or slow and their tasks were collected again, which takes longer, in "
        f"{'; '.join(which)}: measure again for figures without."
    ]


def _format_tasks(cases: Sequence[Case]) -> str:
    """What a repetition does, whoever does it."""
    return "; ".join(
        f"{case.name}: {format_count(case.tasks, 'task')} an iteration, "
        f"{format_count(case.iterations, 'iteration')}"
        for case in cases
    ) + "."  # fmt: skip


def _format_missing_workers(cells: Sequence[Cell]) -> list[str]:
    """Cells with fewer workers than asked for, once a fleet and number."""
    present_by_fleet = {
        (cell.fleet, cell.workers): min(cell.capacity, cell.answered)
        for cell in cells
        if cell.start_s is not None and min(cell.capacity, cell.answered) < cell.workers
    }
    return [
        f"Of {format_count(workers, 'worker')} of {fleet}, {present or 'none'} had tasks or "
        f"{'was' if present < 2 else 'were'} there."
        for (fleet, workers), present in present_by_fleet.items()
    ]


def _make_loss_blocks(result: ScalingResult) -> list[Block]:
    head = ("case", "fleet", "workers", "learning", "latency and dispatch", "start-up, s")
    body = tuple(
        (
            row.cell.case,
            row.cell.fleet,
            str(row.cell.workers),
            f"{row.learning:.1%}",
            NOTHING if row.lost is None else f"{row.lost:.1%}",
            NOTHING if row.cell.start_s is None else f"{row.cell.start_s:.2f}",
        )
        for row in result.rows
    )
    blocks: list[Block] = [
        "Shares of the measured time. Latency and dispatch is what is left beside learning and "
        "the episodes themselves, where their length is known; start-up is from opening the fleet "
        "to the end of its first iterations, once a fleet, and is in no other figure.",
        Table(head, body, 2),
    ]
    if result.overheads:
        overhead_rows = tuple(
            (overhead.fleet, f"{1000.0 * overhead.task_s:.2f}",
             f"{1000.0 * overhead.iteration_s:.2f}", str(overhead.cells))
            for overhead in result.overheads
        )  # fmt: skip
        blocks += [
            "Least squares over the rows above: an iteration of T tasks on P workers takes its "
            "learning, ceil(T / P) times a task's episodes and overhead, and its own, neither of "
            "the two below 0. Flame's README says some 100 ms a task.",
            Table(("fleet", "ms a task", "ms an iteration", "rows"), overhead_rows),
        ]
    return blocks


def _make_gain_blocks(result: ScalingResult, fleet_gains: Sequence[Any]) -> list[Block]:
    lengths = {case.name: case.episode_ms for case in result.cases}
    body = tuple(
        (
            gain.case,
            str(gain.workers),
            f"{gain.seconds[0]:.3f}",
            f"{gain.seconds[1]:.3f}",
            _format_percent(gain.percent, _has_intervals(result.cells)),
            find_benefit(length) if (length := lengths[gain.case]) is not None else NOTHING,
        )
        for gain in fleet_gains
    )
    head = ("case", "workers", "local, s", "Flame, s", "gain", "Flame's README")
    return [
        "With as many workers on both sides; the gain is of Flame's throughput over local's. Flame "
        "can win here only where its executors have more processors than this machine.",
        Table(head, body),
    ]


def _make_published_blocks(result: ScalingResult) -> list[Block]:
    published = result.published
    assert published is not None
    machine = result.conditions.machine
    body = [
        (f"{published.source}, {name}", published.hardware, f"{side.seconds:,.2f}",
         f"{published.episodes / side.seconds:,.1f}", f"{side.reward:,.1f}")
        for name, side in (("local", published.local), ("Flame", published.flame))
    ]  # fmt: skip
    for row in result.rows:
        repetition = row.cell.repetitions[-1]
        reward = NOTHING if repetition.final_return is None else f"{repetition.final_return:,.1f}"
        body.append((
            f"rlflame, {row.cell.fleet}, {format_count(row.cell.workers, 'worker')}",
            f"{machine['processor']}, {format_count(machine['usable_cores'], 'core')}",
            f"{row.seconds.value:,.2f}",
            f"{repetition.episodes / row.seconds.value:,.1f}",
            reward,
        ))  # fmt: skip
    short = result.cases[0].iterations < published.iterations
    gain = 100.0 * (published.local.seconds / published.flame.seconds - 1.0)
    return [
        f"{published.environment}, {published.iterations} iterations of "
        f"{published.episodes_per_iteration} episodes, REINFORCE, by us with their hyperparameters "
        "where no --set says otherwise. The hardware is not the same, so seconds across it compare "
        "nothing; and their two sides are two programs, of one trial each.",
        Table(("run", "hardware", "seconds", "episodes/s", "last mean reward"), tuple(body), 2),
        f"Their gain, (distributed - local) / local of the throughput, is {gain:+.1f}%"
        + ("; ours is in the section above." if compute_gains(result.cells) else "."),
        *(
            [f"Ours ran {format_count(result.cases[0].iterations, 'iteration')} only."]
            if short
            else []
        ),
    ]


def format_conditions(conditions: MachineConditions, complete: bool) -> list[Block]:
    """What the numbers have to be read with."""
    machine, load, now = conditions.machine, conditions.load_before, conditions.at_work
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    threads = ", ".join(f"{name}={value}" for name, value in conditions.threads.items())
    blocks: list[Block] = [
        f"{machine['processor']}, {machine['usable_cores']} of {machine['cores']} cores usable, "
        f"{format_size(machine['memory_bytes'])}; {machine['system']}, {machine['libc']}, Python "
        f"{machine['python']}; {packages}; BLAS {machine['blas']}.",
        f"Threads: {threads or 'as the libraries choose'}; one in each worker.",
        "Load before: "
        + (" ".join(f"{value:.2f}" for value in load) if load else "unknown")
        + " (1, 5 and 15 minutes)"
        + ("." if now is None else f"; {now:.1f} processors at work when it began")
        + ("." if now is not None and conditions.others is None else "")
        + (
            ""
            if conditions.others is None
            else f"; {conditions.others:.1f} at work for others meanwhile."
        ),
    ]
    if conditions.busy:
        blocks.append(
            "This machine was busy with other work: take these figures for a try, and measure "
            "again when it is idle."
        )
    if not complete:
        blocks.append("Stopped before the end: what was measured until then.")
    return blocks


def format_interval(value: Interval, times: int, digits: int, unit: str = "") -> str:
    text = f"{value.value:,.{digits}f}{unit}"
    if times < FEWEST_SEEDS:
        return text
    return f"{text} [{value.low:,.{digits}f}, {value.high:,.{digits}f}]"


def _has_intervals(cells: Sequence[Cell]) -> bool:
    """Whether there is enough of each for an interval to mean something."""
    return min(len(cell.repetitions) for cell in cells) >= FEWEST_SEEDS


def _format_percent(value: Interval, with_interval: bool) -> str:
    text = f"{value.value:+.1f}%"
    return f"{text} [{value.low:+.1f}%, {value.high:+.1f}%]" if with_interval else text
