"""A replay benchmark as data and in words. Must not know: how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from rlflame import __version__
from rlflame.analysis.report.document import Block, Document, Section, Table
from rlflame.bench.base import Case, MachineConditions
from rlflame.bench.published import REPLAY
from rlflame.bench.replay import FillSeries
from rlflame.bench.scaling_model import has_equal_digests
from rlflame.bench.scaling_report import (
    NOTHING,
    format_bits,
    format_conditions,
    format_interval,
    format_retried,
)
from rlflame.statistics import Interval, compare_medians, compute_median_interval
from rlflame.terminal_text import format_count


@dataclass(frozen=True)
class ReplayResult:
    """All that a replay benchmark has seen."""

    case: Case
    fillings: Sequence[FillSeries]
    conditions: MachineConditions
    complete: bool

    @property
    def same_bits(self) -> bool | None:
        return has_equal_digests(
            fill.content for filling in self.fillings for fill in filling.fills
        )

    def to_facts(self) -> dict[str, Any]:
        return {
            "benchmark": "replay",
            "rlflame": __version__,
            "complete": self.complete,
            **self.conditions.as_dict(),
            "environment": self.case.env.id,
            "case": self.case.name,
            "iterations": self.case.iterations,
            "same_bits": self.same_bits,
            "fillings": [
                {
                    "fleet": filling.fleet,
                    "workers": filling.workers,
                    "fills": [
                        {
                            **asdict(fill),
                            "transitions": fill.transitions,
                            "transitions_per_s": fill.per_s,
                            "added_per_s": fill.added_per_s,
                        }
                        for fill in filling.fills
                    ],
                }
                for filling in self.fillings
            ],
            "published": asdict(REPLAY),
            "measurements": [
                {
                    "name": self._format_name(filling),
                    "unit": "transitions/s",
                    "better": "higher",
                    "values": [fill.per_s for fill in filling.fills],
                    "retried": [fill.retried for fill in filling.fills],
                    "work": self.case.work,
                }
                for filling in self.fillings
            ],
        }

    def _format_name(self, filling: FillSeries) -> str:
        return f"{self.case.name}, {filling.fleet} with {filling.workers}"

    def to_document(self) -> Document:
        return Document(
            f"Benchmark: a replay of {self.case.env.id}",
            (
                Section("Rate", tuple(self._make_rate_blocks())),
                Section("Beside what was published", tuple(self._make_published_blocks())),
                Section("Measured on", tuple(format_conditions(self.conditions, self.complete))),
            ),
        )

    def _make_rate_blocks(self) -> list[Block]:
        rollout = self.case.recipe.learning.rollout
        head = ("fleet", "workers", "times", "transitions/s", "collecting", "adding alone, /s",
                "sampling alone, /s", "bytes a transition")  # fmt: skip
        body = []
        for filling in self.fillings:
            fills = filling.fills
            rates = np.array([fill.per_s for fill in fills], np.float64)
            crossed = median(fill.bytes_in / fill.transitions for fill in fills)
            body.append((
                filling.fleet,
                str(filling.workers),
                str(len(fills)),
                format_interval(compute_median_interval(rates), len(fills), 0),
                f"{median(fill.collect_s / fill.seconds for fill in fills):.1%}",
                f"{median(fill.added_per_s for fill in fills):,.0f}",
                f"{median(fill.drawn_per_s for fill in fills):,.0f}",
                f"{crossed:,.1f}" if crossed else NOTHING,
            ))  # fmt: skip
        return [
            f"{self.fillings[0].fills[0].transitions:,} transitions of random actions"
            f"{self._format_buffer_note()}: {format_count(self.case.iterations, 'iteration')} of "
            f"{format_count(rollout.num_slots, 'fragment')} of "
            f"{format_count(rollout.steps, 'step')}, from the "
            f"fleet into the replay, and a batch of {self._batch} out of it after each. Start-up "
            "is in no figure.",
            Table(head, tuple(body), 2),
            *format_bits(
                [self.same_bits],
                "Every replay held the same in the end, to the last bit.",
                "The replays did not hold the same.",
                elsewhere=any(filling.fleet == "flame" for filling in self.fillings),
            ),
            *self._format_traffic(),
            *format_retried(
                {
                    self._format_name(filling): [fill.retried for fill in filling.fills]
                    for filling in self.fillings
                }
            ),
        ]

    def _format_buffer_note(self) -> str:
        """Where whole rounds are more than what was wanted, which the replay is as large as."""
        settings, rollout = self.case.recipe.learning.sac, self.case.recipe.learning.rollout
        assert settings is not None
        if settings.buffer_size >= self.fillings[0].fills[0].transitions:
            return ""
        round_steps = rollout.columns * rollout.steps
        return f" (room is for {settings.buffer_size:,}, and a round is {round_steps:,})"

    @property
    def _batch(self) -> int:
        settings = self.case.recipe.learning.sac
        assert settings is not None
        return settings.batch_size

    def _format_traffic(self) -> list[str]:
        """Whether what crosses the wire grows with what is stored."""
        lines = []
        for filling in self.fillings:
            first, last = (filling.fills[-1].iterations[place].bytes_in for place in (0, -1))
            if first and self.case.iterations > 1:
                grows = "" if last > 1.2 * first else ": what is new crosses, and nothing else"
                lines.append(
                    f"From {filling.fleet} came {first:,} bytes in the first iteration and "
                    f"{last:,} in the last{grows}."
                )
        return lines

    def _make_published_blocks(self) -> list[Block]:
        published, machine = REPLAY, self.conditions.machine
        hardware = f"{machine['processor']}, {format_count(machine['usable_cores'], 'core')}"
        body = [
            (published.source, mode, published.environment, published.hardware, f"{rate:,.0f}")
            for mode, rate in published.rates.items()
        ]
        body += [
            ("rlflame", f"{filling.fleet}, "
                        f"{format_count(filling.workers, 'worker')}", self.case.env.id,
             hardware, f"{median(fill.per_s for fill in filling.fills):,.0f}")
            for filling in self.fillings
        ]  # fmt: skip
        return [
            "Another environment (ours learns from replays where actions are numbers) on other "
            "hardware: rates across it compare nothing, the relation of one side's own rows does.",
            Table(("source", "run", "environment", "hardware", "transitions/s"), tuple(body), 3),
            f"Their Flame with incremental reads has {published.share:.2f} of their local rate.",
            *self._format_relations(),
        ]

    def _format_relations(self) -> list[str]:
        """Of ours, with as many workers."""
        local_by_workers = {f.workers: f for f in self.fillings if f.fleet == "local"}
        lines = []
        for filling in self.fillings:
            other = local_by_workers.get(filling.workers)
            if filling.fleet != "flame" or other is None:
                continue
            change = compare_medians(
                # Of seconds, as everywhere: how much more a second goes through on Flame.
                np.array([fill.seconds for fill in other.fills], np.float64),
                np.array([fill.seconds for fill in filling.fills], np.float64),
            )
            share = Interval(
                *(1.0 + value / 100.0 for value in (change.value, change.low, change.high))
            )
            lines.append(
                f"Ours, with {filling.workers}: {format_interval(share, len(filling.fills), 2)}."
            )
        return lines
