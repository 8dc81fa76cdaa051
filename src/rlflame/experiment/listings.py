"""What `rlflame runs`, `envs` and `config` list: runs, environments and settings. Never writes.

A sweep is one line; listed by itself, a line for each of its seeds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
from pydantic.fields import FieldInfo

from rlflame.config import regular_file, resolve, toml_io
from rlflame.config.algorithms import TRAITS
from rlflame.config.recipe import EnvironmentSettings, RunConfig
from rlflame.config.validation import walk_settings
from rlflame.errors import CheckpointError, ConfigError
from rlflame.experiment.resume import has_final_evaluation, is_finished
from rlflame.statistics import compute_interquartile_means
from rlflame.storage import run_reader
from rlflame.storage.run_folder import is_locked, load_newest_checkpoint
from rlflame.storage.sweep_folder import SWEEP_FILE, is_sweep, list_seed_runs

_TAIL_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class RunOverview:
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


def list_runs(folder: Path) -> list[RunOverview]:
    """The run folders in a folder, or the folder itself where it is one; newest last."""
    if is_run(folder):
        return [read_run_overview(folder)]
    if is_sweep(folder):
        return [read_run_overview(path) for path in list_seed_runs(folder) if is_run(path)]
    try:
        paths = [path for path in folder.iterdir() if is_run(path) or is_sweep(path)]
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror}.", "rlflame runs DIR lists another folder"
        ) from error
    return [
        read_sweep_overview(path) if is_sweep(path) else read_run_overview(path)
        for path in sorted(paths, key=_read_age)
    ]


def is_run(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return folder.is_dir() and (
            (folder / "config.toml").is_file()
            and any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", ".lock"))
        )
    return False


def read_run_overview(folder: Path) -> RunOverview:
    training = is_locked(folder)
    problems: list[str] = []
    try:
        checkpoint = load_newest_checkpoint(folder, problems.append)
    except (CheckpointError, OSError) as error:
        # A run that has only just begun has no checkpoint yet.
        state = "training" if training else "damaged"
        return RunOverview(str(folder), state, problem=None if training else str(error))
    recipe, progress = checkpoint.recipe, checkpoint.progress
    # Without its final evaluation a run has something left to do.
    ended = is_finished(checkpoint) and has_final_evaluation(folder, checkpoint)
    # A trainer records each iteration, and saves a checkpoint now and then.
    last = _read_last_counts(folder) if training else {}
    return RunOverview(
        folder=str(folder),
        state="training" if training else "finished" if ended else "stopped",
        environment=recipe.learning.environment.id,
        algorithm=recipe.learning.algorithm,
        seed=recipe.learning.seed,
        steps=max(progress.steps, last.get("steps", 0)),
        stop_at_steps=recipe.stop_at_steps,
        iterations=max(progress.iteration, last.get("iteration", 0)),
        stop_at_iterations=recipe.stop_at_iterations,
        best_return=checkpoint.best.mean if checkpoint.best else None,
        problem=problems[0] if problems else None,
    )


def _read_age(folder: Path) -> tuple[float, str]:
    """When a run or a seed of a job was changed last, and its name."""
    times = [0.0]
    for path in (folder, *list_seed_runs(folder)):
        for name in ("metrics.jsonl", "config.toml"):
            with contextlib.suppress(OSError):
                times.append((path / name).stat().st_mtime)
    return max(times), folder.name


def read_sweep_overview(folder: Path) -> RunOverview:
    """A job of seeds as one line."""
    try:
        tables = toml_io.read_file(folder / SWEEP_FILE)
        number = len(tables["job"]["seeds"])
    except (ConfigError, LookupError, TypeError) as error:
        return RunOverview(
            str(folder), "damaged", problem=f"{folder / SWEEP_FILE} cannot be read ({error})"
        )
    runs = [read_run_overview(path) for path in list_seed_runs(folder) if is_run(path)]
    ended = sum(run.state == "finished" for run in runs)
    bests = [run.best_return for run in runs if run.best_return is not None]
    return RunOverview(
        folder=str(folder),
        state="training" if is_locked(folder) else "finished" if ended == number else "stopped",
        environment=next((run.environment for run in runs if run.environment), None),
        algorithm=next((run.algorithm for run in runs if run.algorithm), None),
        steps=sum(run.steps or 0 for run in runs),
        best_return=float(compute_interquartile_means(np.array(bests))) if bests else None,
        problem=next((run.problem for run in runs if run.problem), None),
        seeds=number,
        seeds_finished=ended,
    )


def _read_last_counts(folder: Path) -> dict[str, int]:
    """What the last whole line of the record counts; a running trainer may be writing the next."""
    try:
        with regular_file.open_to_read(folder / "metrics.jsonl") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        line = run_reader.parse_line(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}
    return {name: number for name, number in line.items() if isinstance(number, int)}


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """An alias, what it stands for, and the presets that suit it."""

    alias: str
    id: str
    observations: int | None
    actions: int | None
    continuous: bool | None
    presets: tuple[str, ...]
    problem: str | None = None


def list_environments() -> list[EnvironmentEntry]:
    """All aliases, looked at as they are installed here."""
    from rlflame.experiment.components import inspect_env  # loads numpy

    entries = []
    for alias, target in resolve.ALIASES.items():
        observations = actions = continuous = problem = None
        try:
            spec = inspect_env(EnvironmentSettings(id=target.id))
            observations, actions = spec.observation_size, spec.action_size
            continuous = spec.action_kind == "continuous"
        except ConfigError as error:
            problem = error.message
        presets = tuple(
            resolve.choose_preset(target.id, name)
            for name, traits in TRAITS.items()
            if continuous is not False or not traits.squashed_actions
        )
        entries.append(
            EnvironmentEntry(alias, target.id, observations, actions, continuous, presets, problem)
        )
    return entries


@dataclass(frozen=True, slots=True)
class Setting:
    """One knob: its full name, what it may be, what it is unless set, and what it means."""

    name: str
    range: str
    default: Any
    description: str


def list_settings() -> list[Setting]:
    """Every setting there is, read from the config model."""
    return [
        Setting(
            name,
            _format_type(field.annotation, field.metadata),
            field.get_default(call_default_factory=True),
            field.description or "",
        )
        for name, field in walk_settings(RunConfig)
    ]


def _format_type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type and its bounds: `integer >= 1 and <= 4096 | none`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _format_type(inner[0], [*annotation.__metadata__, *metadata])
    if origin is Literal:
        return " | ".join(str(value) for value in inner)
    if origin in (Union, UnionType):
        member_types = [
            _format_type(member, metadata) for member in inner if member is not NoneType
        ]
        return " | ".join([*member_types, "none"] if NoneType in inner else member_types)
    if origin is tuple:
        return f"list of {_format_type(inner[0])}"
    if origin is dict:
        return "table"
    name = {int: "integer", float: "number", str: "text", bool: "true | false"}[annotation]
    bounds = " and ".join(_format_bounds(metadata))
    return f"{name} {bounds}".strip()


def _format_bounds(metadata: Sequence[Any]) -> list[str]:
    # Inside an Annotated the bounds may come as they are or in a Field.
    constraints = [
        inner
        for outer in metadata
        for inner in (outer.metadata if isinstance(outer, FieldInfo) else [outer])
    ]
    return [
        f"{sign} {_format_bound(value)}"
        for sign, name in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt"))
        for value in (getattr(constraint, name, None) for constraint in constraints)
        if value is not None
    ]


def _format_bound(value: float) -> str:
    return "2^63" if value == 2**63 else f"{value:,}" if isinstance(value, int) else f"{value:g}"
