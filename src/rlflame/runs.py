"""The run folders under a folder: what they are, and how far they got. Never writes.

Must not know: display.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlflame.errors import CheckpointError
from rlflame.onward import finished
from rlflame.run_folder import is_locked, newest_checkpoint

_TAIL_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder at a glance. `state` is training, finished, stopped, or damaged."""

    folder: str
    state: str
    environment: str | None = None
    algorithm: str | None = None
    seed: int | None = None
    steps: int | None = None
    stop_at_steps: int | None = None
    iterations: int | None = None
    stop_at_iterations: int | None = None
    best_return: float | None = None
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_runs(folder: Path) -> list[Run]:
    """The run folders in a folder, or the folder itself where it is one; newest last."""
    if is_run(folder):
        return [look(folder)]
    found = [path for path in _children(folder) if is_run(path)]
    return [look(path) for path in sorted(found, key=_changed_at)]


def is_run(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return folder.is_dir() and (
            (folder / "config.toml").is_file()
            and any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", ".lock"))
        )
    return False


def look(folder: Path) -> Run:
    training = is_locked(folder)
    problems: list[str] = []
    try:
        found = newest_checkpoint(folder, problems.append)
    except (CheckpointError, OSError) as error:
        # A run that has only just begun has no checkpoint yet.
        state = "training" if training else "damaged"
        return Run(str(folder), state, problem=None if training else str(error))
    recipe, progress = found.recipe, found.progress
    state = "training" if training else "finished" if finished(found) else "stopped"
    steps, iterations = progress.steps, progress.iteration
    if training:
        last = _last_metrics(folder)
        steps = max(steps, int(last.get("steps", 0)))
        iterations = max(iterations, int(last.get("iteration", 0)))
    return Run(
        folder=str(folder),
        state=state,
        environment=recipe.learning.environment.id,
        algorithm=recipe.learning.algorithm,
        seed=recipe.learning.seed,
        steps=steps,
        stop_at_steps=recipe.stop_at_steps,
        iterations=iterations,
        stop_at_iterations=recipe.stop_at_iterations,
        best_return=found.best.mean if found.best else None,
        problem=problems[0] if problems else None,
    )


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror}.", "rlflame runs DIR lists another folder"
        ) from error


def _changed_at(folder: Path) -> tuple[float, str]:
    times = [0.0]
    for name in ("metrics.jsonl", "config.toml"):
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times), folder.name


def _last_metrics(folder: Path) -> dict[str, Any]:
    """The last whole line of the record; a running trainer may be writing the next."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        value = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
