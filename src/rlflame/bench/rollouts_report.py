"""A rollout benchmark as data and in words. Must not know: how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from rlflame import __version__
from rlflame.analysis.report.document import Block, Document, Section, Table
from rlflame.bench.base import Case, MachineConditions
from rlflame.bench.published import EPISODE_MS
from rlflame.bench.rollouts import RolloutRate
from rlflame.bench.scaling_report import NOTHING, format_conditions, format_interval, format_retried
from rlflame.statistics import compute_median_interval


@dataclass(frozen=True)
class RolloutsResult:
    """All that a rollout benchmark has seen."""

    case: Case
    rates: Sequence[RolloutRate]
    conditions: MachineConditions
    complete: bool

    def to_facts(self) -> dict[str, Any]:
        return {
            "benchmark": "rollouts",
            "rlflame": __version__,
            "complete": self.complete,
            **self.conditions.as_dict(),
            "environment": self.case.env.id,
            "case": self.case.name,
            "rates": [
                {
                    "fleet": rate.fleet,
                    "workers": rate.workers,
                    "steps_per_s": rate.steps_per_s,
                    "limits": rate.limits,
                    "shares": {way: rate.compute_shares(way) for way in rate.limits},
                    "ms_per_episode": rate.ms_per_episode,
                    "steps": rate.steps,
                    "episodes": rate.episodes,
                }
                for rate in self.rates
            ],
            "measurements": [
                {
                    "name": self._format_name(rate),
                    "unit": "steps/s",
                    "better": "higher",
                    "values": rate.steps_per_s,
                    "retried": rate.retried,
                    "work": self.case.rollout_settings,
                }
                for rate in self.rates
            ],
        }

    def to_document(self) -> Document:
        blocks: list[Block] = [
            "Environment steps a second through the fleet and its workers, with a policy that acts "
            "and does not learn, in rounds of one iteration. The limits are bare stepping, as many "
            "processes at once that each repeat recorded resets and actions, measured in turn; a "
            "share is the median over those pairs." + self._format_inline_note(),
            self._make_table(),
            f"{self.case.name}: an untrained policy, {self.case.tasks} tasks a round.",
        ]
        blocks += format_retried({self._format_name(rate): rate.retried for rate in self.rates})
        idle = [rate for rate in self.rates if rate.fleet != "inline" and self._count_idle(rate)]
        blocks += [
            f"Of {rate.workers} workers of {rate.fleet} {self._count_idle(rate)} never had a "
            "task, and "
            "the limit beside them is of as many processes as there are workers: "
            f"--set rollout.num_slots={rate.workers} has one for each."
            for rate in idle
        ]
        return Document(
            f"Benchmark: rollouts of {self.case.env.id}",
            (
                Section("Rate", tuple(blocks)),
                Section("Measured on", tuple(format_conditions(self.conditions, self.complete))),
            ),
        )

    def _format_name(self, rate: RolloutRate) -> str:
        return f"{self.case.name}, {rate.fleet} with {rate.workers}"

    def _count_idle(self, rate: RolloutRate) -> int:
        return max(0, rate.workers - self.case.tasks)

    def _format_inline_note(self) -> str:
        if not any(rate.fleet == "inline" and rate.workers > 1 for rate in self.rates):
            return ""
        return (
            " One worker inline is this process; several are as many processes, each with rounds "
            "of its own, as several seeds have them."
        )

    def _make_table(self) -> Table:
        ways = list(dict.fromkeys(way for rate in self.rates for way in rate.limits))
        quoted = EPISODE_MS.get(self.case.env.id)
        head = ["fleet", "workers", "times", "steps/s"]
        for way in ways:
            head += [f"bare {way}", "share"]
        head += ["ms an episode", *(["Flame's README"] if quoted is not None else [])]
        rows = []
        for rate in self.rates:
            values = np.array(rate.steps_per_s, np.float64)
            row = [rate.fleet, str(rate.workers), str(len(values)),
                   format_interval(compute_median_interval(values), len(values), 0)]  # fmt: skip
            for way in ways:
                most, shares = rate.limits.get(way, []), rate.compute_shares(way)
                row += [f"{median(most):,.0f}", f"{median(shares):.3f}"] if most else [NOTHING] * 2
            length = rate.ms_per_episode
            row.append(NOTHING if length is None else f"{length:,.2f}")
            rows.append((*row, *([f"~{quoted:g}"] if quoted is not None else [])))
        return Table(tuple(head), tuple(rows))
