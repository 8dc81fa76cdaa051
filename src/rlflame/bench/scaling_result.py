"""A scaling benchmark in words and tables. Must not know: how it was timed, where it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.analysis.report.document import Block, Document, Section, Table
from rlflame.bench import advice
from rlflame.bench.base import Case, Cell, Surroundings
from rlflame.bench.published import SPEEDUPS, Comparison, benefit
from rlflame.bench.scaling_model import Overhead, Row, gains, overheads, rows, same_bits
from rlflame.statistics import FEWEST_SEEDS, Interval
from rlflame.text import format_count, format_size

NOTHING = "-"


@dataclass(frozen=True)
class Result:
    """All that a scaling benchmark has seen."""

    cases: Sequence[Case]
    cells: Sequence[Cell]
    surroundings: Surroundings
    complete: bool
    theirs: Comparison | None = None

    @property
    def rows(self) -> list[Row]:
        return rows(self.cases, self.cells)

    @property
    def overheads(self) -> list[Overhead]:
        return overheads(self.cases, self.cells)

    def advice(self) -> list[str]:
        cores = int(self.surroundings.machine["usable_cores"])
        return advice.sentences(self.cases, self.rows, self.overheads, cores)


def document(result: Result) -> Document:
    sections = [
        Section("Speed-up", tuple(_speedup(result))),
        Section("Where the time goes", tuple(_losses(result))),
    ]
    if found := gains(result.cells):
        sections.append(Section("Flame beside this machine", tuple(_gains(result, found))))
    if result.theirs is not None:
        sections.append(Section("Beside what was published", tuple(_published(result))))
    sections += [
        Section("What to do", tuple(result.advice())),
        Section("Measured on", tuple(surroundings(result.surroundings, result.complete))),
    ]
    return Document("Benchmark: scaling", tuple(sections))


def _speedup(result: Result) -> list[Block]:
    quoted = any(row.cell.workers in SPEEDUPS for row in result.rows)
    head: tuple[str, ...] = ("case", "fleet", "workers", "times", "seconds", "steps/s")
    head += ("theoretical", "speed-up", "efficiency")
    body = tuple(
        (
            row.cell.case,
            row.cell.fleet,
            str(row.cell.workers),
            str(len(row.cell.repetitions)),
            spread(row.seconds, len(row.cell.repetitions), 3),
            f"{row.cell.repetitions[0].steps / row.seconds.value:,.0f}",
            f"{row.theoretical:.2f}x",
            spread(row.speedup, len(row.cell.repetitions), 2, "x"),
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
        _tasks(result.cases),
        *bits(
            [same_bits(result.cells, case.name) for case in result.cases],
            "Every side learned the same weights, to the last bit.",
            "The sides did not learn the same weights.",
            elsewhere=any(cell.fleet == "flame" for cell in result.cells),
        ),
        *_missing(result.cells),
        *disturbed({cell.name: cell.retried for cell in result.cells}),
    ]


def bits(
    found: Sequence[bool | None], same: str, different: str, *, elsewhere: bool = False
) -> list[str]:
    """A sentence on what was compared, and none where nothing was."""
    known = [one for one in found if one is not None]
    if not known:
        return []
    if all(known):
        return [same]
    return [different + " Executors on other machines may be why." * elsewhere]


def disturbed(found: Mapping[str, Sequence[int]]) -> list[str]:
    """A sentence on repetitions, by name, in which tasks went to a second worker."""
    which = [
        f"{name}, {number} of {len(each)} ({format_count(tasks, 'task')})"
        for name, each in found.items()
        for number, tasks in enumerate(each, 1)
        if tasks
    ]
    if not which:
        return []
    return [
        "Workers were lost or slow and their tasks were collected again, which takes longer, in "
        f"{'; '.join(which)}: measure again for figures without."
    ]


def _tasks(cases: Sequence[Case]) -> str:
    """What a repetition does, whoever does it."""
    return "; ".join(
        f"{case.name}: {format_count(case.tasks, 'task')} an iteration, "
        f"{format_count(case.iterations, 'iteration')}"
        for case in cases
    ) + "."  # fmt: skip


def _missing(cells: Sequence[Cell]) -> list[str]:
    """Cells with fewer workers than asked for, once a fleet and number."""
    found = {
        (cell.fleet, cell.workers): min(cell.capacity, cell.answered)
        for cell in cells
        if cell.start_s is not None and min(cell.capacity, cell.answered) < cell.workers
    }
    return [
        f"Of {format_count(workers, 'worker')} of {fleet}, {there or 'none'} had tasks or "
        f"{'was' if there < 2 else 'were'} there."
        for (fleet, workers), there in found.items()
    ]


def _losses(result: Result) -> list[Block]:
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
        fitted = tuple(
            (one.fleet, f"{1000.0 * one.task_s:.2f}", f"{1000.0 * one.iteration_s:.2f}",
             str(one.cells))
            for one in result.overheads
        )  # fmt: skip
        blocks += [
            "Least squares over the rows above: an iteration of T tasks on P workers takes its "
            "learning, ceil(T / P) times a task's episodes and overhead, and its own, neither of "
            "the two below 0. Flame's README says some 100 ms a task.",
            Table(("fleet", "ms a task", "ms an iteration", "rows"), fitted),
        ]
    return blocks


def _gains(result: Result, found: Sequence[Any]) -> list[Block]:
    lengths = {case.name: case.episode_ms for case in result.cases}
    body = tuple(
        (
            gain.case,
            str(gain.workers),
            f"{gain.seconds[0]:.3f}",
            f"{gain.seconds[1]:.3f}",
            _percent(gain.percent, _repeated(result.cells)),
            benefit(length) if (length := lengths[gain.case]) is not None else NOTHING,
        )
        for gain in found
    )
    head = ("case", "workers", "local, s", "Flame, s", "gain", "Flame's README")
    return [
        "With as many workers on both sides; the gain is of Flame's throughput over local's. Flame "
        "can win here only where its executors have more processors than this machine.",
        Table(head, body),
    ]


def _published(result: Result) -> list[Block]:
    theirs = result.theirs
    assert theirs is not None
    machine = result.surroundings.machine
    body = [
        (f"{theirs.source}, {name}", theirs.hardware, f"{side.seconds:,.2f}",
         f"{theirs.episodes / side.seconds:,.1f}", f"{side.reward:,.1f}")
        for name, side in (("local", theirs.local), ("Flame", theirs.flame))
    ]  # fmt: skip
    for row in result.rows:
        one = row.cell.repetitions[-1]
        reward = NOTHING if one.final_return is None else f"{one.final_return:,.1f}"
        body.append((
            f"rlflame, {row.cell.fleet}, {format_count(row.cell.workers, 'worker')}",
            f"{machine['processor']}, {format_count(machine['usable_cores'], 'core')}",
            f"{row.seconds.value:,.2f}",
            f"{one.episodes / row.seconds.value:,.1f}",
            reward,
        ))  # fmt: skip
    short = result.cases[0].iterations < theirs.iterations
    gain = 100.0 * (theirs.local.seconds / theirs.flame.seconds - 1.0)
    return [
        f"{theirs.environment}, {theirs.iterations} iterations of "
        f"{theirs.episodes_per_iteration} episodes, REINFORCE, by us with their hyperparameters "
        "where no --set says otherwise. The hardware is not the same, so seconds across it compare "
        "nothing; and their two sides are two programs, of one trial each.",
        Table(("run", "hardware", "seconds", "episodes/s", "last mean reward"), tuple(body), 2),
        f"Their gain, (distributed - local) / local of the throughput, is {gain:+.1f}%"
        + ("; ours is in the section above." if gains(result.cells) else "."),
        *(
            [f"Ours ran {format_count(result.cases[0].iterations, 'iteration')} only."]
            if short
            else []
        ),
    ]


def surroundings(found: Surroundings, complete: bool) -> list[Block]:
    """What the numbers have to be read with."""
    machine, load, now = found.machine, found.load_before, found.at_work
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    threads = ", ".join(f"{name}={value}" for name, value in found.threads.items())
    said: list[Block] = [
        f"{machine['processor']}, {machine['usable_cores']} of {machine['cores']} cores usable, "
        f"{format_size(machine['memory_bytes'])}; {machine['system']}, {machine['libc']}, Python "
        f"{machine['python']}; {packages}; BLAS {machine['blas']}.",
        f"Threads: {threads or 'as the libraries choose'}; one in each worker.",
        "Load before: "
        + (" ".join(f"{value:.2f}" for value in load) if load else "unknown")
        + " (1, 5 and 15 minutes)"
        + ("." if now is None else f"; {now:.1f} processors at work when it began")
        + ("." if now is not None and found.others is None else "")
        + ("" if found.others is None else f"; {found.others:.1f} at work for others meanwhile."),
    ]
    if found.busy:
        said.append(
            "This machine was busy with other work: take these figures for a try, and measure "
            "again when it is idle."
        )
    if not complete:
        said.append("Stopped before the end: what was measured until then.")
    return said


def spread(value: Interval, times: int, digits: int, unit: str = "") -> str:
    text = f"{value.value:,.{digits}f}{unit}"
    if times < FEWEST_SEEDS:
        return text
    return f"{text} [{value.low:,.{digits}f}, {value.high:,.{digits}f}]"


def _repeated(cells: Sequence[Cell]) -> bool:
    """Whether there is enough of each for an interval to mean something."""
    return min(len(cell.repetitions) for cell in cells) >= FEWEST_SEEDS


def _percent(value: Interval, known: bool) -> str:
    text = f"{value.value:+.1f}%"
    return f"{text} [{value.low:+.1f}%, {value.high:+.1f}%]" if known else text
