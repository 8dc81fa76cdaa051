"""A scaling benchmark as data: what `--json` and scaling.json hold, and the rows of its table.

Must not know: files, words.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlflame import __version__
from rlflame.bench.scaling_model import compute_gains, has_same_bits
from rlflame.bench.scaling_report import ScalingResult

HEAD = ("case", "workers", "backend", "seconds", "steps", "episodes", "collect_s", "learn_s",
        "retried")  # fmt: skip


def make_facts(result: ScalingResult) -> dict[str, Any]:
    """`measurements` is what `rlflame report` and `rlflame bench --diff` compare."""
    cases = {case.name: case for case in result.cases}
    return {
        "benchmark": "scaling",
        "rlflame": __version__,
        "complete": result.complete,
        **result.conditions.as_dict(),
        "cases": [
            {
                "name": case.name,
                "environment": case.env.id,
                "algorithm": case.recipe.learning.algorithm,
                "episode_ms": case.episode_ms,
                "tasks": case.tasks,
                "iterations": case.iterations,
                "same_bits": has_same_bits(result.cells, case.name),
            }
            for case in result.cases
        ],
        "cells": [cell.as_dict() for cell in result.cells],
        "rows": [
            {
                "case": row.cell.case,
                "fleet": row.cell.fleet,
                "workers": row.cell.workers,
                "seconds": row.seconds.as_dict(),
                "theoretical": row.theoretical,
                "speedup": row.speedup.as_dict(),
                "learning": row.learning,
                "lost": row.lost,
                "start_s": row.cell.start_s,
            }
            for row in result.rows
        ],
        "overheads": [asdict(entry) for entry in result.overheads],
        "gains": [
            {**asdict(entry), "gain_pct": entry.percent.value}
            for entry in compute_gains(result.cells)
        ],
        "published": asdict(result.published) if result.published is not None else None,
        "advice": result.make_advice(),
        "measurements": [
            {
                "name": cell.name,
                "unit": "s",
                "better": "lower",
                "values": list(cell.seconds),
                "retried": cell.retried,
                "work": cases[cell.case].work,
            }
            for cell in result.cells
        ],
    }


def make_table(result: ScalingResult) -> list[tuple[object, ...]]:
    """A row for each repetition, below the head."""
    return [
        HEAD,
        *(
            (cell.case, cell.workers, cell.fleet, repetition.seconds, repetition.steps,
             repetition.episodes,
             repetition.collect_s, repetition.learn_s, repetition.retried)
            for cell in result.cells
            for repetition in cell.repetitions
        ),
    ]  # fmt: skip
