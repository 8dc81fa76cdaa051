"""The same work on several fleets with several numbers of workers, in turn."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from rlflame.analysis.report.document import Block, Section
from rlflame.bench.case import Case, Stopwatch, run_case, warm_up
from rlflame.bench.result import BenchResult, Side, format_bits, has_equal_digests, make_table
from rlflame.bench.runner import BenchSession, OpenFleet
from rlflame.bench.scaling_model import compute_gains, fit_overheads, make_advice, make_rows
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
        for count in self.workers:
            fleets = session.open_fleets(self.fleets, count, min(self.workers), warm_first)
            with fleets as opened:
                for case in self.cases:
                    if case is not first:
                        for entry in opened:
                            warm_up(case, entry.fleet, stop, clock)
                    self._measure_case(session, case, opened)
                    yield

    def _measure_case(self, session: BenchSession, case: Case, opened: Sequence[OpenFleet]) -> None:
        cells = {
            entry.kind: entry.make_side(
                case.name,
                # How many tasks the fleet can run at one moment, and workers that have answered.
                capacity=entry.fleet.capacity,
                answered=len(entry.fleet.probe()),
                start_s=entry.start_s if case is self.cases[0] else None,
            )
            for entry in opened
        }
        fleets = {entry.kind: entry.fleet for entry in opened}
        self.sides += cells.values()
        for cell in session.take_turns([*cells.values()], self.repeat):
            watch = Stopwatch(session.clock, session.show_progress)
            repetition = run_case(case, fleets[cell.labels["fleet"]], session.stop, watch)
            cell.repetitions.append({**repetition, "retried": session.take_retried()})
        for cell in cells.values():
            session.show_note(
                f"{cell.name}: {cell.compute_median('seconds'):.3f} s (median of {self.repeat})"
            )

    def make_result(self, sides: Sequence[Side]) -> BenchResult:
        rows, overheads = make_rows(self.cases, sides), fit_overheads(self.cases, sides)
        facts: dict[str, Any] = {
            "cases": [_describe_case(case, sides) for case in self.cases],
            "cells": [{**cell.labels, "repetitions": cell.repetitions} for cell in sides],
            "rows": rows,
            "overheads": overheads,
            "gains": compute_gains(sides),
            "advice": make_advice(self.cases, sides, rows, overheads, machine.count_usable_cores()),
        }
        work = {case.name: case.work for case in self.cases}
        return BenchResult(
            self.name,
            "Benchmark: scaling",
            facts,
            _make_sections(facts),
            [cell.make_measurement("seconds", "s", work[cell.labels["case"]]) for cell in sides],
            [("case", "workers", "backend", *_REPETITION), *_make_csv_rows(sides)],
        )


def _make_csv_rows(cells: Sequence[Side]) -> list[tuple[object, ...]]:
    return [
        (*map(cell.labels.get, ("case", "workers", "fleet")), *map(run.get, _REPETITION))
        for cell in cells
        for run in cell.repetitions
    ]


def _describe_case(case: Case, cells: Sequence[Side]) -> dict[str, Any]:
    weights = [
        digest
        for cell in cells
        if cell.labels["case"] == case.name
        for digest in cell.list_values("weights")
    ]
    return {
        "name": case.name,
        "environment": case.env.id,
        "algorithm": case.recipe.learning.algorithm,
        "episode_ms": case.episode_ms,
        "tasks": case.tasks,
        "iterations": case.iterations,
        "same_bits": has_equal_digests(weights),
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
        "beside the fastest with the fewest workers; theoretical is the most that the tasks allow.",
        make_table(facts["rows"], _SPEEDUPS, 2),
        f"{tasks}.",
        *format_bits(
            [case["same_bits"] for case in facts["cases"]],
            "Every side learned the same weights, to the last bit.",
            "The sides did not learn the same weights.",
            [cell["fleet"] for cell in facts["cells"]],
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
            make_table([vars(overhead) for overhead in facts["overheads"]], _OVERHEADS),
        ]
    sections = [
        Section("Speed-up", tuple(speedups)),
        Section("Where the time goes", tuple(losses)),
        Section("What to do", tuple(facts["advice"])),
    ]
    if facts["gains"]:
        note = (
            "With as many workers on both sides; the gain is of Flame's throughput over local's. "
            "Flame can win here only where its executors have more processors than this machine."
        )
        gains = Section("Flame beside this machine", (note, make_table(facts["gains"], _GAINS)))
        sections.insert(2, gains)
    return sections


def _format_missing_workers(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each fleet that had fewer workers than asked for."""
    return [
        f"{cell['fleet']} had {min(cell['capacity'], cell['answered'])} of "
        f"{format_count(cell['workers'], 'worker')}."
        for cell in cells
        if cell["start_s"] is not None and min(cell["capacity"], cell["answered"]) < cell["workers"]
    ]
