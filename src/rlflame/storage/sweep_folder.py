"""Defines the files, seed lists and results of a sweep.

A sweep trains one recipe with several seeds. Its folder contains these files and folders:

job.toml       the recipe, the runtime and the seeds
seed-0/ ...    one run folder per seed, as a single run would write it
seeds.csv      one line per seed: progress, returns and digests
summary.json   the same data and statistics over the seeds, as printed by `--json`
plot.png       the learning curves, aggregated over the seeds
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlflame.errors import ConfigError, RlflameError

if TYPE_CHECKING:
    from rlflame.statistics import SeedSummary

SWEEP_FILE = "job.toml"
#: The hint for a damaged or missing job.toml.
RESTORE_HINT = "restore it from a copy, or resume each seed folder by itself with rlflame resume"
#: A longer list of seeds is probably a typo.
MAX_SEEDS = 1000
_PART = re.compile(r"(\d{1,19})(?:-(\d{1,19}))?")
_MAX_NAME_LENGTH = 60


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse a list of seeds in the given order: `0-2,7` gives (0, 1, 2, 7)."""
    seeds: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        many = len(seeds) + last - first >= MAX_SEEDS
        if last < first or last >= 2**63 or many or set(seeds) & set(range(first, last + 1)):
            raise ConfigError(
                f"--seeds {text!r} is not a list of up to {MAX_SEEDS} distinct seeds below 2**63.",
                "--seeds 0-9, or --seeds 0,3,7",
            )
        seeds += range(first, last + 1)
    return tuple(seeds)


def format_seeds(seeds: Iterable[int]) -> str:
    """Format seeds for `parse_seeds`: (0, 1, 2, 7) gives `0-2,7`."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def format_folder_name(seeds: Sequence[int]) -> str:
    """Return a name such as `seeds-0-9` or, for a long list, `50-seeds`."""
    name = f"seeds-{format_seeds(seeds)}"
    return name if len(name) <= _MAX_NAME_LENGTH else f"{len(seeds)}-seeds"


def get_seed_folder(folder: Path, seed: int) -> Path:
    return folder / f"seed-{seed}"


def is_sweep(folder: Path) -> bool:
    try:
        return (folder / SWEEP_FILE).is_file()
    except OSError:
        return False


def list_seed_runs(folder: Path) -> list[Path]:
    """List the folders of the seeds that have started, sorted by seed."""
    try:
        paths = [
            path for path in folder.glob("seed-*") if path.name[5:].isdigit() and path.is_dir()
        ]
    except OSError:
        return []
    return sorted(paths, key=lambda path: int(path.name[5:]))


SeedEnd = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class SeedOutcome:
    """How the process of a seed ended, and its error if it failed."""

    end: SeedEnd
    error: RlflameError | None = None


COLUMNS = (
    "seed", "state", "steps", "iterations", "episodes", "return_mean", "return_std", "return_low",
    "return_high", "evaluation_episodes", "best_return", "state_digest", "digest",
)  # fmt: skip


@dataclass(frozen=True)
class SeedResult:
    """The result of one seed. `state` is waiting, stopped, finished or failed."""

    seed: int
    folder: Path
    state: str
    steps: int = 0
    iterations: int = 0
    episodes: int = 0
    #: The final evaluation; None before training has finished.
    evaluation: Mapping[str, Any] | None = None
    best_return: float | None = None
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
            self.best_return, self.state_digest, self.digest,
        ]  # fmt: skip


@dataclass(frozen=True)
class SweepSummary:
    """The results of all seeds, and statistics over their final evaluations."""

    environment: str
    algorithm: str
    seeds: tuple[SeedResult, ...]
    final: SeedSummary | None
    worst_seed: int | None

    @property
    def complete(self) -> bool:
        return all(seed.state == "finished" for seed in self.seeds)

    def as_dict(self) -> dict[str, Any]:
        final = self.final and {**asdict(self.final), "worst_seed": self.worst_seed}
        return {
            "environment": self.environment,
            "algorithm": self.algorithm,
            "complete": self.complete,
            "final": final,
            "seeds": [seed.as_dict() for seed in self.seeds],
        }

    def as_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(seed.as_row() for seed in self.seeds)
        return text.getvalue()
