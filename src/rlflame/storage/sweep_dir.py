"""Many seeds of one recipe as one job: how they are named, and how its folder is laid out.

    job.toml       the recipe and the runtime, and the seeds
    seed-0/ ...    a run folder a seed, as a lone run of it would leave
    seeds.csv      a line a seed: how far, how good, digests
    summary.json   the same and what the seeds say together, as `--json` prints it
    plot.png       their curves, seeds taken together

Must not know: processes, what a run is made of, display.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlflame.errors import ConfigError

JOB_FILE = "job.toml"
#: What to do where it is damaged.
RESTORED = "restore it from a copy; every seed in it is a run that rlflame resume takes alone"
#: More seeds than anybody has published of one recipe; a slip of the finger lies beyond.
MOST_SEEDS = 1000
_PART = re.compile(r"(\d{1,19})(?:-(\d{1,19}))?")
_EXAMPLE = "--seeds 0-9, or --seeds 0,3,7"
_LONGEST_NAME = 60


def parse(text: str) -> tuple[int, ...]:
    """`0-2,7` -> 0, 1, 2, 7, in the order in which they were named."""
    found: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--seeds {text!r} is not a list of seeds.", _EXAMPLE)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(
                f"--seeds {text!r} counts backwards in {part.strip()}.", f"--seeds {last}-{first}"
            )
        if len(found) + last - first >= MOST_SEEDS:
            raise ConfigError(
                f"--seeds {text!r} is more than {MOST_SEEDS} seeds.", f"fewer of them: {_EXAMPLE}"
            )
        found += range(first, last + 1)
    twice = sorted({seed for seed in found if found.count(seed) > 1})
    if twice:
        raise ConfigError(
            f"--seeds {text!r} names seed {twice[0]} twice: it would be the same run.",
            f"--seeds {written(dict.fromkeys(found))}",
        )
    if max(found) >= 2**63:
        raise ConfigError(f"Seed {max(found)} is beyond 2**63 - 1.", _EXAMPLE)
    return tuple(found)


def written(seeds: Sequence[int] | dict[int, None]) -> str:
    """0, 1, 2, 7 -> `0-2,7`, which `parse` reads."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def folder_name(seeds: Sequence[int]) -> str:
    """`seeds-0-9`."""
    name = f"seeds-{written(seeds)}"
    return name if len(name) <= _LONGEST_NAME else f"{len(seeds)}-seeds"


def seed_folder(job: Path, seed: int) -> Path:
    return job / f"seed-{seed}"


def is_job(folder: Path) -> bool:
    try:
        return (folder / JOB_FILE).is_file()
    except OSError:
        return False


def runs_in(job: Path) -> list[Path]:
    """The folders of the seeds that have begun, in the order of the seeds."""
    try:
        found = [path for path in job.glob("seed-*") if path.name[5:].isdigit() and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name[5:]))
