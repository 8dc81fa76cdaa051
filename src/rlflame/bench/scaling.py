"""The same work on several fleets with several numbers of workers, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rlflame.analysis.report.document import Block, make_table
from rlflame.bench.case import Case, Stopwatch, run_case, warm_up
from rlflame.bench.result import BenchResult, Side, format_bits, has_equal_digests
from rlflame.bench.runner import BenchSession, FleetBenchmark
from rlflame.bench.scaling_model import fit_overheads, make_advice, make_rows
from rlflame.fleet.base import Fleet
from rlflame.rollout import machine
from rlflame.statistics import FEWEST_SEEDS
from rlflame.terminal_text import format_count

_COLUMNS = (
    *("case", "fleet", "workers", "times"),
    ("seconds", "seconds", ",.3f"),
    ("steps/s", "steps_per_s", ",.0f"),
    ("theoretical", "theoretical", ".2fx"),
    ("speed-up", "speedup", ".2fx"),
    ("gain of Flame, %", "gain_pct", "+.1f"),
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
_REPETITION = ("seconds", "steps", "episodes", "collect_s", "learn_s", "retried")


class ScalingBenchmark(FleetBenchmark):
    """The training of several cases."""

    name: ClassVar[str] = "scaling"

    def warm_up(self, session: BenchSession, case: Case, fleet: Fleet) -> None:
        wait_for_all = case is self.cases[0]
        warm_up(case, fleet, session.stop, session.clock, wait_for_all=wait_for_all)

    def run_once(self, session: BenchSession, case: Case, fleet: Fleet) -> dict[str, Any]:
        watch = Stopwatch(session.clock, session.show_progress)
        return run_case(case, fleet, session.stop, watch)

    def make_result(self, sides: Sequence[Side]) -> BenchResult:
        rows, overheads = make_rows(self.cases, sides), fit_overheads(self.cases, sides)
        facts: dict[str, Any] = {
            "cases": [_describe_case(case, sides) for case in self.cases],
            "cells": [{**cell.labels, "repetitions": cell.repetitions} for cell in sides],
            "rows": rows,
            "overheads": overheads,
            "advice": make_advice(rows, overheads, machine.count_usable_cores()),
        }
        work = {case.name: case.work for case in self.cases}
        return BenchResult(
            self.name,
            "Benchmark: scaling",
            facts,
            _make_blocks(facts),
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
    case_cells = [cell for cell in cells if cell.labels["case"] == case.name]
    weights = [digest for cell in case_cells for digest in cell.list_values("weights")]
    return {
        "name": case.name,
        "environment": case.env.id,
        "algorithm": case.recipe.learning.algorithm,
        "episode_ms": case.episode_ms,
        "tasks": case.tasks,
        "iterations": case.iterations,
        "same_bits": has_equal_digests(weights),
    }


def _make_blocks(facts: dict[str, Any]) -> list[Block]:
    tasks = "; ".join(
        f"{case['name']}: {format_count(case['tasks'], 'task')} an iteration, "
        f"{format_count(case['iterations'], 'iteration')}"
        for case in facts["cases"]
    )
    blocks: list[Block] = [
        "The same training on every side; medians with 95% bootstrap intervals from "
        f"{FEWEST_SEEDS} repetitions on. Speed-up is beside the fastest with the fewest workers; "
        "theoretical is the most that the tasks allow. Gain is the throughput of Flame over that "
        "of as many local workers. Latency and dispatch is the time beside learning and the "
        "episodes, where their length is known. Start-up is in no other figure.",
        make_table(facts["rows"], _COLUMNS, 2),
        f"{tasks}.",
        *format_bits(
            [case["same_bits"] for case in facts["cases"]],
            "The learned weights",
            [cell["fleet"] for cell in facts["cells"]],
        ),
        *_format_missing_workers(facts["cells"]),
    ]
    if facts["overheads"]:
        blocks += [
            "Overhead by least squares over these rows: an iteration of T tasks on P workers takes "
            "its learning, ceil(T / P) times the episodes and the overhead of a task, and its own "
            "overhead.",
            make_table([vars(overhead) for overhead in facts["overheads"]], _OVERHEADS),
        ]
    return [*blocks, *facts["advice"]]


def _format_missing_workers(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each fleet that had fewer workers than asked for."""
    return [
        f"{cell['fleet']} had {min(cell['capacity'], cell['answered'])} of "
        f"{format_count(cell['workers'], 'worker')}."
        for cell in cells
        if cell["start_s"] is not None and min(cell["capacity"], cell["answered"]) < cell["workers"]
    ]
