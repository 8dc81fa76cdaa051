"""The same work on several fleets with several numbers of workers, in turn."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any, ClassVar

from rlflame.analysis.report.document import Block, Section
from rlflame.bench.case import Case, Stopwatch, count_answered_workers, run_case, warm_up
from rlflame.bench.result import BenchResult, Side, format_bits, has_equal_digests, make_table
from rlflame.bench.runner import BenchSession, OpenFleet
from rlflame.bench.scaling_model import (
    compute_gains,
    fit_overheads,
    make_advice,
    make_rows,
)
from rlflame.rollout import machine
from rlflame.statistics import FEWEST_SEEDS
from rlflame.terminal_text import format_count

_SPEEDUPS = (
    *("case", "fleet", "workers", "times"),
    ("seconds", "seconds", ",.3f"),
    ("steps/s", "steps_per_s", ",.0f"),
    ("theoretical", "theoretical", ".2fx"),
    ("speed-up", "speedup", ".2fx"),
    ("efficiency", "efficiency", ".2f"),
)
_LOSSES = (
    *("case", "fleet", "workers"),
    ("learning", "learning", ".1%"),
    ("latency and dispatch", "lost", ".1%"),
    ("start-up, s", "start_s", ".2f"),
)
_OVERHEADS = (
    "fleet",
    ("ms a task", "task_s", "ms"),
    ("ms an iteration", "iteration_s", "ms"),
    ("rows", "cells", ""),
)
_GAINS = (
    *("case", "workers"),
    ("local, s", "local_s", ".3f"),
    ("Flame, s", "flame_s", ".3f"),
    ("gain, %", "percent", "+.1f"),
)
_REPETITION = ("seconds", "steps", "episodes", "collect_s", "learn_s", "retried")


@dataclass
class ScalingBenchmark:
    """Cases on several fleets, all open at once, with one number of workers after the other."""

    cases: Sequence[Case]
    fleets: Sequence[str]
    workers: Sequence[int]
    repeat: int
    sides: list[Side] = field(default_factory=list)
    name: ClassVar[str] = "scaling"

    def measure(self, session: BenchSession) -> Generator[None, None, None]:
        first, stop, clock = self.cases[0], session.stop, session.clock
        warm_first = partial(warm_up, first, stop=stop, clock=clock, wait_for_all=True)
        fewest = min(self.workers)
        for count in self.workers:
            with session.open_fleets(self.fleets, count, fewest, warm_first) as opened:
                for case in self.cases:
                    if case is not first:
                        for entry in opened:
                            warm_up(case, entry.fleet, stop, clock)
                    self._measure_case(session, case, opened)
                    yield

    def _measure_case(self, session: BenchSession, case: Case, opened: Sequence[OpenFleet]) -> None:
        fleets = {entry.kind: entry.fleet for entry in opened}
        cells = [self._make_cell(case, entry) for entry in opened]
        self.sides += cells
        for cell in session.take_turns({cell.name: cell for cell in cells}, self.repeat):
            watch = Stopwatch(session.clock, session.show_progress)
            repetition = run_case(case, fleets[cell.labels["fleet"]], session.stop, watch)
            cell.repetitions.append({**repetition, "retried": session.take_retried()})
        for cell in cells:
            seconds = f"{median(cell.list_values('seconds')):.3f} s (median of {self.repeat})"
            session.show_note(f"{cell.name}: {seconds}")

    def _make_cell(self, case: Case, entry: OpenFleet) -> Side:
        labels = {
            "case": case.name,
            "fleet": entry.kind,
            "workers": entry.workers,
            # How many tasks the fleet can run at one moment, and workers that have answered.
            "capacity": entry.fleet.capacity,
            "answered": count_answered_workers(entry.fleet),
            "start_s": entry.start_s if case is self.cases[0] else None,
        }
        return Side(f"{case.name}, {entry.kind} with {entry.workers}", labels)

    def make_result(self, sides: Sequence[Side]) -> BenchResult:
        rows, overheads = make_rows(self.cases, sides), fit_overheads(self.cases, sides)
        advice = make_advice(self.cases, sides, rows, overheads, machine.count_usable_cores())
        facts: dict[str, Any] = {
            "cases": [_describe_case(case, sides) for case in self.cases],
            "cells": [{**cell.labels, "repetitions": cell.repetitions} for cell in sides],
            "rows": rows,
            "overheads": [asdict(overhead) for overhead in overheads],
            "gains": compute_gains(sides),
            "advice": advice,
        }
        work = {case.name: case.work for case in self.cases}
        return BenchResult(
            self.name,
            "Benchmark: scaling",
            facts,
            _make_sections(facts),
            [cell.make_measurement("seconds", "s", work[cell.labels["case"]]) for cell in sides],
            _make_csv_rows(sides),
        )


def _make_csv_rows(cells: Sequence[Side]) -> list[tuple[object, ...]]:
    """A row for each repetition, below the head."""
    rows: list[tuple[object, ...]] = [("case", "workers", "backend", *_REPETITION)]
    for cell in cells:
        labels = [cell.labels[key] for key in ("case", "workers", "fleet")]
        rows += [(*labels, *(run[key] for key in _REPETITION)) for run in cell.repetitions]
    return rows


def _describe_case(case: Case, cells: Sequence[Side]) -> dict[str, Any]:
    case_cells = [cell for cell in cells if cell.labels["case"] == case.name]
    return {
        "name": case.name,
        "environment": case.env.id,
        "algorithm": case.recipe.learning.algorithm,
        "episode_ms": case.episode_ms,
        "tasks": case.tasks,
        "iterations": case.iterations,
        "same_bits": has_equal_digests(
            w for cell in case_cells for w in cell.list_values("weights")
        ),
    }


def _make_sections(facts: dict[str, Any]) -> list[Section]:
    tasks = "; ".join(
        f"{case['name']}: {format_count(case['tasks'], 'task')} an iteration, "
        f"{format_count(case['iterations'], 'iteration')}"
        for case in facts["cases"]
    )
    speedups: list[Block] = [
        "The same work on every side, collecting and learning, through the loop that trains; "
        f"medians with 95% bootstrap intervals from {FEWEST_SEEDS} repetitions on. Speed-up is "
        "beside the fastest with the fewest workers; theoretical is what so many tasks allow "
        "on so many workers.",
        make_table(facts["rows"], _SPEEDUPS, 2),
        f"{tasks}.",
        *format_bits(
            [case["same_bits"] for case in facts["cases"]],
            "Every side learned the same weights, to the last bit.",
            "The sides did not learn the same weights.",
            elsewhere=any(cell["fleet"] == "flame" for cell in facts["cells"]),
        ),
        *_format_missing_workers(facts["cells"]),
    ]
    losses: list[Block] = [
        "Shares of the measured time. Latency and dispatch is the rest beside learning and the "
        "episodes themselves, where their length is known. Start-up is from opening the fleet "
        "to the end of its first iterations, and is in no other figure.",
        make_table(facts["rows"], _LOSSES, 2),
    ]
    if facts["overheads"]:
        losses += [
            "Least squares over the rows above: an iteration of T tasks on P workers takes its "
            "learning, ceil(T / P) times the episodes and the overhead of a task, and its own "
            "overhead; neither overhead is below 0.",
            make_table(facts["overheads"], _OVERHEADS),
        ]
    gains: list[Block] = [
        "With as many workers on both sides; the gain is of Flame's throughput over local's. "
        "Flame can win here only where its executors have more processors than this machine."
    ]
    if facts["gains"]:
        gains.append(make_table(facts["gains"], _GAINS))
    return [
        Section("Speed-up", tuple(speedups)),
        Section("Where the time goes", tuple(losses)),
        *([Section("Flame beside this machine", tuple(gains))] if facts["gains"] else []),
        Section("What to do", tuple(facts["advice"])),
    ]


def _format_missing_workers(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each fleet that had fewer workers than asked for."""
    sentences = []
    for cell in cells:
        present, workers = min(cell["capacity"], cell["answered"]), cell["workers"]
        if cell["start_s"] is not None and present < workers:
            verb = "was" if present < 2 else "were"
            sentences.append(
                f"Of {format_count(workers, 'worker')} of {cell['fleet']}, {present or 'none'} had "
                f"tasks or {verb} there."
            )
    return sentences
