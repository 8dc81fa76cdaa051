"""The results of a sweep's seeds, each by itself and together."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rlflame.errors import RlflameError
from rlflame.statistics import MeanStd, SeedSummary

SeedEnd = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class SeedOutcome:
    """How a seed's process ended; an error where it was not as it should."""

    end: SeedEnd
    error: RlflameError | None = None


COLUMNS = (
    "seed", "state", "steps", "iterations", "episodes", "return_mean", "return_std", "return_low",
    "return_high", "evaluation_episodes", "best_return", "last_evaluations", "state_digest",
    "digest",
)  # fmt: skip


@dataclass(frozen=True)
class SeedResult:
    """One seed. `state` is waiting, stopped, finished or failed."""

    seed: int
    folder: Path
    state: str
    steps: int = 0
    iterations: int = 0
    episodes: int = 0
    #: The final evaluation, once there is one, and the best of all.
    evaluation: Mapping[str, Any] | None = None
    best_return: float | None = None
    #: Mean of the last twentieth of the evaluations in training.
    last_evaluations: float | None = None
    state_digest: str = ""
    digest: str = ""
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}

    def as_row(self) -> list[Any]:
        evaluation = self.evaluation or {}
        return [
            self.seed, self.state, self.steps, self.iterations, self.episodes,
            *(evaluation.get(name) for name in ("mean", "std", "low", "high", "episodes")),
            self.best_return, self.last_evaluations, self.state_digest, self.digest,
        ]  # fmt: skip


@dataclass(frozen=True)
class SweepSummary:
    """All seeds, and what those say together that have a final evaluation."""

    environment: str
    algorithm: str
    seeds: tuple[SeedResult, ...]
    final: SeedSummary | None
    worst_seed: int | None
    #: Steps at which it was, mean and standard deviation.
    p2: tuple[int, MeanStd] | None
    p4: MeanStd | None

    @property
    def complete(self) -> bool:
        return all(seed.state == "finished" for seed in self.seeds)

    def as_dict(self) -> dict[str, Any]:
        final = self.final and {**self.final.as_dict(), "worst_seed": self.worst_seed}
        return {
            "environment": self.environment,
            "algorithm": self.algorithm,
            "complete": self.complete,
            "final": final,
            "p2": self.p2 and {"steps": self.p2[0], **self.p2[1].as_dict()},
            "p4": self.p4 and self.p4.as_dict(),
            "seeds": [seed.as_dict() for seed in self.seeds],
        }

    def as_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(seed.as_row() for seed in self.seeds)
        return text.getvalue()
