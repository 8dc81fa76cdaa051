"""Groups of runs of one recipe that differ in the seed alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.config import nested
from rlflame.storage.run_reader import RunData
from rlflame.terminal_text import format_count

#: Follow from the seed or the machine, and are no difference in the recipe.
_SEED = "learning.seed"
#: As it is written in a config, and as it is read from it; a run from before a setting has neither.
_UNSET = ("none", None)


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

    A seed that occurs twice in a recipe is no second sample: such runs are told apart by how they
    ran, by what they lie in, or each by its folder.
    """
    parts: list[list[RunData]] = []
    for same in _partition_runs(runs, _make_recipe_key):
        parts += _split_repeated_seeds(same, (_format_fleet, _format_parent))
    labels = _make_labels(parts)
    return [
        RunGroup(label, tuple(part), name if len(part) > 1 else label)
        for (label, name), part in zip(labels, parts, strict=True)
    ]


def split_group(group: RunGroup) -> list[RunGroup]:
    """Each run by itself, under a name that tells its seed."""
    seeds = format_count(len(group.runs), "seed")
    labels = [group.label.replace(seeds, f"seed {run.seed}") for run in group.runs]
    return [RunGroup(label, (run,), label) for label, run in zip(labels, group.runs, strict=True)]


def _partition_runs(
    runs: Sequence[RunData], key: Callable[[RunData], str]
) -> Iterator[list[RunData]]:
    parts: dict[str, list[RunData]] = {}
    for run in runs:
        parts.setdefault(key(run), []).append(run)
    yield from parts.values()


def _split_repeated_seeds(
    runs: list[RunData], keys: Sequence[Callable[[RunData], str]]
) -> list[list[RunData]]:
    """Runs of one recipe, told apart by one way after the other until no part has a seed twice."""
    if _has_distinct_seeds(runs):
        return [runs]
    if not keys:
        return [[run] for run in runs]
    key, *further = keys
    return [
        part for same in _partition_runs(runs, key) for part in _split_repeated_seeds(same, further)
    ]


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


def _format_parent(run: RunData) -> str:
    return str(run.folder.resolve().parent)


def _make_labels(parts: Sequence[Sequence[RunData]]) -> list[tuple[str, str]]:
    """Of each: the algorithm, the environment if there are several, what else differs; its name."""
    environments = {part[0].environment for part in parts}
    labels, names = [], []
    for part in parts:
        first = part[0]
        words = [first.algorithm.upper()]
        if len(environments) > 1:
            words[0] += f" {first.environment}"
        alike = [other for other in parts if _make_head(other) == _make_head(part)]
        if len(alike) > 1:
            words += _list_differences(first, [other[0] for other in alike])
        names.append(", ".join(words))
        words.append(f"seed {first.seed}" if len(part) == 1 else format_count(len(part), "seed"))
        labels.append(", ".join(words))
    for label in {label for label in labels if labels.count(label) > 1}:
        which = [i for i, other in enumerate(labels) if other == label]
        for i, place in zip(
            which, _shorten_paths([_find_path_parts(parts[i]) for i in which]), strict=True
        ):
            labels[i], names[i] = f"{label} ({place})", f"{names[i]} ({place})"
    return list(zip(labels, names, strict=True))


def _find_path_parts(part: Sequence[RunData]) -> tuple[str, ...]:
    """Of a run its folder, of several what they lie in."""
    folder = part[0].folder.resolve()
    return (folder if len(part) == 1 else folder.parent).parts


def _shorten_paths(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """As much of each path, from its end, as tells it from the others."""
    for length in range(1, max(map(len, paths)) + 1):
        ends = ["/".join(path[-length:]) for path in paths]
        if len(set(ends)) == len(ends):
            return ends
    return ["/".join(path[-1:]) for path in paths]


def _make_head(part: Sequence[RunData]) -> tuple[str, str]:
    return part[0].algorithm, part[0].environment


def _list_differences(run: RunData, other_runs: Sequence[RunData]) -> list[str]:
    """The settings in which it differs from the others, the first few; else how it ran."""
    settings, other_settings = _list_settings(run), [_list_settings(other) for other in other_runs]
    if any(values != settings for values in other_settings):
        all_names = dict.fromkeys(name for values in (settings, *other_settings) for name in values)
        names = [
            k
            for k in all_names
            if any(values.get(k) != settings.get(k) for values in other_settings)
        ]
        words = [
            f"{name.rpartition('.')[2]} {_format_value(settings.get(name, 'none'))}"
            for name in names[:3]
        ]
        return [*words, *(["..."] if len(names) > 3 else [])]
    return [_format_fleet(run)] if len({_format_fleet(other) for other in other_runs}) > 1 else []


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
