"""Lists runs, environments and settings for `rlflame runs`, `envs` and `config`.

Listing never writes files. In a list of runs, each sweep takes one line. A list of a sweep folder
has one line per seed.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import TypeAdapter

from rlflame.config import preset_catalog, regular_file, toml_io
from rlflame.config.algorithms import TRAITS
from rlflame.config.recipe import EnvironmentSettings, RunConfig
from rlflame.config.validation import walk_settings
from rlflame.errors import CheckpointError, ConfigError
from rlflame.experiment.resume import has_final_evaluation, is_finished
from rlflame.statistics import compute_interquartile_means
from rlflame.storage import run_reader
from rlflame.storage.run_folder import is_locked, load_newest_checkpoint
from rlflame.storage.sweep_folder import SWEEP_FILE, is_sweep, list_seed_runs

#: How the types and bounds in a JSON schema are shown as the range of a setting.
_TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true | false",
    "object": "table",
    "null": "none",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A summary of a run or a sweep.

    `state` is training, finished, stopped or damaged.
    """

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
    #: For sweeps only: the number of all seeds and the number of finished seeds. In a sweep,
    #: `best_return` is the interquartile mean of the best returns of the seeds.
    seeds: int | None = None
    seeds_finished: int | None = None


def list_runs(folder: Path) -> list[RunOverview]:
    """List the runs and sweeps in a folder, newest last.

    For a run folder, list only that run; for a sweep folder, list its seeds.
    """
    if is_run(folder):
        return [read_run_overview(folder)]
    if is_sweep(folder):
        return _list_seeds(folder)
    try:
        paths = [path for path in folder.iterdir() if is_run(path) or is_sweep(path)]
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror}.", "list another folder: rlflame runs DIR"
        ) from error
    return [
        read_sweep_overview(path) if is_sweep(path) else read_run_overview(path)
        for path in sorted(paths, key=_read_age)
    ]


def _list_seeds(folder: Path) -> list[RunOverview]:
    return [read_run_overview(path) for path in list_seed_runs(folder) if is_run(path)]


def is_run(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return (folder / "config.toml").is_file() and any(
            (folder / name).exists() for name in ("metrics.jsonl", "checkpoints", ".lock")
        )
    return False


def read_run_overview(folder: Path) -> RunOverview:
    training = is_locked(folder)
    problems: list[str] = []
    try:
        checkpoint = load_newest_checkpoint(folder, problems.append)
    except (CheckpointError, OSError) as error:
        # A run that has just started has no checkpoint yet.
        state = "training" if training else "damaged"
        return RunOverview(str(folder), state, problem=None if training else str(error))
    recipe, progress = checkpoint.recipe, checkpoint.progress
    # A run without its final evaluation is not complete.
    is_complete = is_finished(checkpoint) and has_final_evaluation(folder, checkpoint)
    # The metrics may be newer than the checkpoint, because each iteration records them.
    last = _read_last_line(folder / "metrics.jsonl") if training else {}
    return RunOverview(
        folder=str(folder),
        state="training" if training else "finished" if is_complete else "stopped",
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
    """Return a sort key: the time of the last change, and the folder name."""
    times = [0.0]
    for path in (folder, *list_seed_runs(folder)):
        for name in ("metrics.jsonl", "config.toml"):
            with contextlib.suppress(OSError):
                times.append((path / name).stat().st_mtime)
    return max(times), folder.name


def read_sweep_overview(folder: Path) -> RunOverview:
    """Return one overview for a whole sweep."""
    try:
        number = len(toml_io.read_file(folder / SWEEP_FILE)["job"]["seeds"])
    except (ConfigError, LookupError, TypeError) as error:
        problem = f"{folder / SWEEP_FILE} is not a valid sweep file ({error})."
        return RunOverview(str(folder), "damaged", problem=problem)
    runs = _list_seeds(folder)
    total = sum(run.state == "finished" for run in runs)
    bests = [run.best_return for run in runs if run.best_return is not None]
    return RunOverview(
        folder=str(folder),
        state="training" if is_locked(folder) else "finished" if total == number else "stopped",
        environment=next((run.environment for run in runs if run.environment), None),
        algorithm=next((run.algorithm for run in runs if run.algorithm), None),
        steps=sum(run.steps or 0 for run in runs),
        best_return=float(compute_interquartile_means(np.array(bests))) if bests else None,
        problem=next((run.problem for run in runs if run.problem), None),
        seeds=number,
        seeds_finished=total,
    )


def _read_last_line(path: Path) -> dict[str, Any]:
    """Return the numbers in a log's last complete line, or {} on error."""
    last = ""
    try:
        for line in regular_file.read_lines(path):
            last = line if line.endswith("\n") else last
        return run_reader.parse_line(last)
    except (OSError, ValueError):
        return {}


def list_environments() -> list[dict[str, Any]]:
    """List the environment aliases with their presets and space sizes.

    If an environment cannot be created, its entry has the reason instead of the sizes.
    """
    from rlflame.experiment.components import inspect_env  # slow to import

    entries = []
    for alias, target in preset_catalog.ALIASES.items():
        sizes = dict[str, Any].fromkeys(("observations", "actions", "continuous", "problem"))
        try:
            spec = inspect_env(EnvironmentSettings(id=target.id))
            sizes |= {"observations": spec.observation_size, "actions": spec.action_size}
            sizes["continuous"] = spec.action_kind == "continuous"
        except ConfigError as error:
            sizes["problem"] = error.message
        presets = [
            preset_catalog.choose_preset(target.id, name)
            for name, traits in TRAITS.items()
            if sizes["continuous"] is not False or not traits.squashed_actions
        ]
        entries.append({"alias": alias, "id": target.id, **sizes, "presets": presets})
    return entries


def list_settings() -> list[dict[str, Any]]:
    """List all settings, with their ranges, defaults and descriptions."""
    settings = []
    for name, field in walk_settings(RunConfig):
        bounded_type: Any = Annotated[field.annotation, field]
        settings.append(
            {
                "name": name,
                "range": _format_range(TypeAdapter(bounded_type).json_schema()),
                "default": field.get_default(call_default_factory=True),
                "description": field.description or "",
            }
        )
    return settings


def select_settings(
    settings: list[dict[str, Any]], config: RunConfig, preset: str
) -> list[dict[str, Any]]:
    """Return the settings of the algorithm of a config, with its values.

    A value that differs from the default comes from the preset, which is named.
    """
    selection = []
    others = tuple(f"learning.{name}." for name in TRAITS if name != config.learning.algorithm)
    for setting in settings:
        if not setting["name"].startswith(others):
            # Not from a dump, which leaves out some settings with a default value.
            value = functools.reduce(getattr, setting["name"].split("."), config)
            source = None if value == setting["default"] else preset
            selection.append({**setting, "value": value, "preset": source})
    return selection


def _format_range(schema: dict[str, Any]) -> str:
    """Format a JSON schema, for example as `integer >= 1 and <= 4,096 | none`."""
    if "$ref" in schema:
        return "tables"
    if "anyOf" in schema:
        return " | ".join(map(_format_range, schema["anyOf"]))
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if schema["type"] == "array":
        items = _format_range(schema["items"])
        return f"list of {items.replace('integer', 'integers', 1)}"
    bounds = [
        f"{sign} {_format_bound(schema[name])}" for name, sign in _BOUNDS.items() if name in schema
    ]
    return f"{_TYPES[schema['type']]} {' and '.join(bounds)}".strip()


def _format_bound(value: float) -> str:
    return "2^63" if value == 2**63 else f"{value:,}" if isinstance(value, int) else f"{value:g}"
