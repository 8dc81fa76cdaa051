"""The run folders under a folder: what they are, and how far they got. Never writes.

A job of seeds is one line; listed by itself, a line for each of its seeds.

Must not know: display.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.config import regular_file, toml_io
from rlflame.errors import CheckpointError, ConfigError
from rlflame.experiment.resume import finished, scored
from rlflame.statistics import interquartile_means
from rlflame.storage import run_files
from rlflame.storage.run_dir import is_locked, newest_checkpoint
from rlflame.storage.sweep_dir import JOB_FILE, is_job, runs_in

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
    #: Of a job of seeds, how many there are and how many have finished; the best is then the
    #: interquartile mean of their bests.
    seeds: int | None = None
    seeds_finished: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_runs(folder: Path) -> list[Run]:
    """The run folders in a folder, or the folder itself where it is one; newest last."""
    if is_run(folder):
        return [look(folder)]
    if is_job(folder):
        return [look(path) for path in runs_in(folder) if is_run(path)]
    found = [path for path in _children(folder) if is_run(path) or is_job(path)]
    return [look_at_job(path) if is_job(path) else look(path) for path in _by_age(found)]


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
    # Without its final evaluation a run has something left to do.
    ended = finished(found) and scored(folder, found)
    state = "training" if training else "finished" if ended else "stopped"
    steps, iterations = progress.steps, progress.iteration
    if training:
        last = _last_metrics(folder)
        steps = max(steps, last.get("steps", 0))
        iterations = max(iterations, last.get("iteration", 0))
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


def _by_age(folders: list[Path]) -> list[Path]:
    ages = {
        folder: max(_changed_at(inner) for inner in (folder, *runs_in(folder)))
        for folder in folders
    }
    return sorted(folders, key=lambda folder: (ages[folder][0], folder.name))


def look_at_job(folder: Path) -> Run:
    """A job of seeds as one line."""
    try:
        tables = toml_io.read_file(folder / JOB_FILE)
        number = len(tables["job"]["seeds"])
    except (ConfigError, LookupError, TypeError) as error:
        return Run(str(folder), "damaged", problem=f"{folder / JOB_FILE} cannot be read ({error})")
    runs = [look(path) for path in runs_in(folder) if is_run(path)]
    ended = sum(run.state == "finished" for run in runs)
    bests = [run.best_return for run in runs if run.best_return is not None]
    known = next((run for run in runs if run.environment is not None), None)
    state = "finished" if ended == number else "stopped"
    return Run(
        folder=str(folder),
        state="training" if is_locked(folder) else state,
        environment=known.environment if known else None,
        algorithm=known.algorithm if known else None,
        steps=sum(run.steps or 0 for run in runs),
        best_return=float(interquartile_means(np.array(bests))) if bests else None,
        problem=next((run.problem for run in runs if run.problem), None),
        seeds=number,
        seeds_finished=ended,
    )


def _changed_at(folder: Path) -> tuple[float, str]:
    times = [0.0]
    for name in ("metrics.jsonl", "config.toml"):
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times), folder.name


def _last_metrics(folder: Path) -> dict[str, int]:
    """What the last whole line of the record counts; a running trainer may be writing the next."""
    try:
        with regular_file.open_to_read(folder / "metrics.jsonl") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        value = run_files.value(lines[-1].decode()) if lines else {}
    except (OSError, ValueError):
        return {}
    said = value if isinstance(value, dict) else {}
    return {name: number for name, number in said.items() if run_files.is_count(number)}
