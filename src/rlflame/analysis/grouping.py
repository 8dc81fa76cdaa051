"""Groups of runs of one recipe that differ in the seed alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.config import nested
from rlflame.storage.run_reader import RunData
from rlflame.terminal_text import format_count

#: Follows from the seed, and is no difference in the recipe.
_SEED = "learning.seed"
#: As it is written in a config, and as it is read from it; a run from before a setting has neither.
_UNSET = ("none", None)
#: Settings that a label names.
_MOST_SETTINGS = 3


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs of one recipe with different seeds.

    The label tells it from others; of several runs the name is that without how many they are.
    """

    label: str
    runs: tuple[RunData, ...]
    name: str

    @property
    def environment(self) -> str:
        return self.runs[0].environment


def group_runs(runs: Sequence[RunData]) -> list[RunGroup]:
    """In the order in which the runs were named.

    A seed that occurs twice in a recipe is no second sample: such runs form
    groups by fleet and workers, then by parent folder, then one group for each run.
    """
    parts = _partition_runs(runs, _make_recipe_key)
    numbers = itertools.count()
    for key in (_format_fleet, lambda run: run.folder.resolve().parent, lambda _: next(numbers)):
        parts = [
            smaller
            for part in parts
            for smaller in ([part] if _has_distinct_seeds(part) else _partition_runs(part, key))
        ]
    names = [_make_name(part[0], [other[0] for other in parts]) for part in parts]
    labels = [f"{name}, {_format_seeds(part)}" for name, part in zip(names, parts, strict=True)]
    for label in {label for label in labels if labels.count(label) > 1}:
        alike = [i for i, other in enumerate(labels) if other == label]
        for i, place in zip(alike, _find_places([parts[i] for i in alike]), strict=True):
            labels[i], names[i] = f"{label} ({place})", f"{names[i]} ({place})"
    return [
        RunGroup(label, tuple(part), name if len(part) > 1 else label)
        for label, part, name in zip(labels, parts, names, strict=True)
    ]


def split_group(group: RunGroup) -> list[RunGroup]:
    """Each run by itself, under a name that tells its seed."""
    labels = [
        group.label.replace(_format_seeds(group.runs), _format_seeds([run])) for run in group.runs
    ]
    return [RunGroup(label, (run,), label) for label, run in zip(labels, group.runs, strict=True)]


def _format_seeds(runs: Sequence[RunData]) -> str:
    return f"seed {runs[0].seed}" if len(runs) == 1 else format_count(len(runs), "seed")


def _partition_runs(
    runs: Sequence[RunData], key: Callable[[RunData], object]
) -> list[list[RunData]]:
    parts: dict[object, list[RunData]] = {}
    for run in runs:
        parts.setdefault(key(run), []).append(run)
    return [*parts.values()]


def _has_distinct_seeds(runs: Sequence[RunData]) -> bool:
    return len({run.seed for run in runs}) == len(runs)


def _make_recipe_key(run: RunData) -> str:
    return json.dumps(_list_settings(run), sort_keys=True, default=str)


def _list_settings(run: RunData) -> dict[str, Any]:
    """The recipe as full names and values, without the seed and what is set to nothing."""
    named = nested.flatten(run.recipe)
    return {name: value for name, value in named if name != _SEED and value not in _UNSET}


def _format_fleet(run: RunData) -> str:
    """Where and with how many workers it ran last, as far as that is known."""
    last = run.machines[-1] if run.machines else {}
    fleet = last.get("fleet") or run.runtime.get("fleet") or "auto"
    workers = last.get("capacity") or run.get_runtime_count("workers")
    return f"{fleet}, {format_count(workers, 'worker')}" if workers else str(fleet)


def _make_name(run: RunData, all_runs: Sequence[RunData]) -> str:
    """The algorithm, the environment if there are several, and what else differs."""
    algorithm = run.algorithm.upper()
    if len({other.environment for other in all_runs}) > 1:
        algorithm += f" {run.environment}"
    alike = [
        other
        for other in all_runs
        if (other.algorithm, other.environment) == (run.algorithm, run.environment)
    ]
    return ", ".join([algorithm, *_list_differences(run, alike)])


def _list_differences(run: RunData, other_runs: Sequence[RunData]) -> list[str]:
    """The settings in which it differs from the others, the first few; else how it ran."""
    settings, other_settings = _list_settings(run), [_list_settings(other) for other in other_runs]
    all_names = dict.fromkeys(name for values in (settings, *other_settings) for name in values)
    names = [
        name
        for name in all_names
        if any(values.get(name) != settings.get(name) for values in other_settings)
    ]
    if names:
        words = [
            f"{name.rpartition('.')[2]} {_format_value(settings.get(name, 'none'))}"
            for name in names[:_MOST_SETTINGS]
        ]
        return [*words, *["..."] * (len(names) > _MOST_SETTINGS)]
    return [_format_fleet(run)] if len({*map(_format_fleet, other_runs)}) > 1 else []


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _find_places(parts: Sequence[Sequence[RunData]]) -> list[str]:
    """The shortest end of each path that differs from the others: the folder of a single run, the
    parent folder of several."""
    folders = [part[0].folder.resolve() for part in parts]
    paths = [
        (folder if len(part) == 1 else folder.parent).parts
        for folder, part in zip(folders, parts, strict=True)
    ]
    for length in range(1, max(map(len, paths)) + 1):
        ends = ["/".join(path[-length:]) for path in paths]
        if len(set(ends)) == len(ends):
            return ends
    return [path[-1] for path in paths]
