"""Groups runs whose recipes differ only in the seed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflame.config import nested_dict
from rlflame.storage.run_reader import RunData
from rlflame.terminal_text import format_count

#: The setting that is ignored when recipes are compared.
_SEED = "learning.seed"
#: The values of an unset setting, in a config file and in Python. Unset settings are not compared,
#: because old runs lack newer settings.
_UNSET = ("none", None)
#: The maximum number of settings in a label.
_MOST_SETTINGS = 3


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs of one recipe with different seeds, and a label for the group."""

    label: str
    runs: tuple[RunData, ...]

    @property
    def environment(self) -> str:
        return self.runs[0].environment


def group_runs(runs: Sequence[RunData]) -> list[RunGroup]:
    """Group runs by recipe, in the order of `runs`.

    Two runs with the same recipe and seed are not independent samples. A group that contains such
    runs is split by parent folder. If all of its runs have the same parent folder, each run becomes
    a separate group.
    """
    recipes = _partition_runs(runs, _format_recipe)
    parts = [part for numbers in recipes for part in _separate_samples(numbers)]
    names = [_make_name(part[0], [other[0] for other in parts]) for part in parts]
    labels = [f"{name}, {_format_seeds(part)}" for name, part in zip(names, parts, strict=True)]
    for label in {label for label in labels if labels.count(label) > 1}:
        numbers = [i for i, other in enumerate(labels) if other == label]
        folders = [_find_folder(parts[i]) for i in numbers]
        for i, folder in zip(numbers, folders, strict=True):
            place = os.path.relpath(folder, os.path.commonpath(folders))
            labels[i] = f"{label} ({folder.name if place == '.' else place})"
    return [RunGroup(label, tuple(part)) for label, part in zip(labels, parts, strict=True)]


def split_group(group: RunGroup) -> list[RunGroup]:
    """Return a group for each run, with its seed in the label."""
    seeds = _format_seeds(group.runs)
    return [RunGroup(group.label.replace(seeds, f"seed {run.seed}"), (run,)) for run in group.runs]


def _format_seeds(runs: Sequence[RunData]) -> str:
    return f"seed {runs[0].seed}" if len(runs) == 1 else format_count(len(runs), "seed")


def _find_folder(runs: Sequence[RunData]) -> Path:
    """Return the folder of a single run, or the parent folder of several."""
    folder = runs[0].folder.resolve()
    return folder if len(runs) == 1 else folder.parent


def _partition_runs(runs: Sequence[RunData], key: Callable[[RunData], str]) -> list[list[RunData]]:
    parts: dict[str, list[RunData]] = {}
    for run in runs:
        parts.setdefault(key(run), []).append(run)
    return [*parts.values()]


def _separate_samples(runs: list[RunData]) -> list[list[RunData]]:
    """Split runs into groups in which no seed occurs twice."""
    if len({run.seed for run in runs}) == len(runs):
        return [runs]
    parts = _partition_runs(runs, lambda run: str(run.folder.resolve().parent))
    if len(parts) == 1:
        return [[run] for run in runs]
    return [smaller for part in parts for smaller in _separate_samples(part)]


def _format_recipe(run: RunData) -> str:
    return json.dumps(_list_settings(run), sort_keys=True, default=str)


def _list_settings(run: RunData) -> dict[str, Any]:
    """Return a recipe's settings by full name, without the seed and unset settings."""
    settings = nested_dict.flatten(run.recipe)
    return {name: value for name, value in settings if name != _SEED and value not in _UNSET}


def _make_name(run: RunData, all_runs: Sequence[RunData]) -> str:
    """Name a run after its algorithm, its environment and its distinctive settings.

    The environment is omitted if all runs have the same one.
    """
    algorithm, settings = run.algorithm.upper(), _list_settings(run)
    if len({other.environment for other in all_runs}) > 1:
        algorithm += f" {run.environment}"
    all_settings = [
        _list_settings(other)
        for other in all_runs
        if (other.algorithm, other.environment) == (run.algorithm, run.environment)
    ]
    words = []
    for name in dict.fromkeys(name for other in all_settings for name in other):
        value = settings.get(name, "none")
        if any(other.get(name, "none") != value for other in all_settings):
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            words.append(f"{name.rpartition('.')[2]} {text}")
    return ", ".join([algorithm, *words[:_MOST_SETTINGS], *["..."] * (len(words) > _MOST_SETTINGS)])
