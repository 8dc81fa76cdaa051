"""Which runs belong together: those of one recipe that differ in the seed alone.

Must not know: what is drawn or said of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlflame import tables
from rlflame.facts import count
from rlflame.history.recorded import Recorded

#: Follow from the seed or the machine, and are no difference in the recipe.
_SEED = "learning.seed"
#: As it is written in a config, and as it is read from it; a run from before a setting has neither.
_NOTHING = ("none", None)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one recipe, each with a seed of its own.

    The label tells it from others; of several runs the name is that without how many they are.
    """

    label: str
    runs: tuple[Recorded, ...]
    name: str

    @property
    def environment(self) -> str:
        return self.runs[0].environment


def groups(runs: Sequence[Recorded]) -> list[Group]:
    """In the order in which the runs were named.

    A seed that occurs twice in a recipe is no second sample: such runs are told apart by how they
    ran, or by their folder.
    """
    found: list[list[Recorded]] = []
    for same in _split(runs, _recipe):
        parts = [same] if _seeds_differ(same) else list(_split(same, _fleet))
        for part in parts:
            found += [part] if _seeds_differ(part) else [[run] for run in part]
    labels = _labels(found)
    return [
        Group(label, tuple(part), name if len(part) > 1 else label)
        for (label, name), part in zip(labels, found, strict=True)
    ]


def split(group: Group) -> list[Group]:
    """Each run by itself, under a name that tells its seed."""
    seeds = count(len(group.runs), "seed")
    labels = [group.label.replace(seeds, f"seed {run.seed}") for run in group.runs]
    return [Group(label, (run,), label) for label, run in zip(labels, group.runs, strict=True)]


def _split(runs: Sequence[Recorded], key: Callable[[Recorded], str]) -> Iterator[list[Recorded]]:
    parts: dict[str, list[Recorded]] = {}
    for run in runs:
        parts.setdefault(key(run), []).append(run)
    yield from parts.values()


def _seeds_differ(runs: Sequence[Recorded]) -> bool:
    return len({run.seed for run in runs}) == len(runs)


def _recipe(run: Recorded) -> str:
    return json.dumps(_settings(run), sort_keys=True, default=str)


def _settings(run: Recorded) -> dict[str, Any]:
    """The recipe as full names and values, without the seed and what is set to nothing."""
    named = tables.named(run.recipe)
    return {name: value for name, value in named if name != _SEED and value not in _NOTHING}


def _fleet(run: Recorded) -> str:
    """Where and with how many workers it ran last, as far as that is known."""
    last = run.machines[-1] if run.machines else {}
    fleet = last.get("fleet") or run.runtime.get("fleet") or "auto"
    workers = last.get("capacity") or run.counted("workers")
    return f"{fleet}, {count(workers, 'worker')}" if workers else str(fleet)


def _labels(found: Sequence[Sequence[Recorded]]) -> list[tuple[str, str]]:
    """Of each: the algorithm, the environment if there are several, what else differs; its name."""
    environments = {part[0].environment for part in found}
    labels, names = [], []
    for part in found:
        first = part[0]
        words = [first.algorithm.upper()]
        if len(environments) > 1:
            words[0] += f" {first.environment}"
        alike = [other for other in found if _head(other) == _head(part)]
        if len(alike) > 1:
            words += _peculiar(first, [other[0] for other in alike])
        names.append(", ".join(words))
        words.append(f"seed {first.seed}" if len(part) == 1 else count(len(part), "seed"))
        labels.append(", ".join(words))
    told = [
        f"{label} ({part[0].folder.name})" if labels.count(label) > 1 else label
        for label, part in zip(labels, found, strict=True)
    ]
    return list(zip(told, names, strict=True))


def _head(part: Sequence[Recorded]) -> tuple[str, str]:
    return part[0].algorithm, part[0].environment


def _peculiar(run: Recorded, others: Sequence[Recorded]) -> list[str]:
    """The settings in which it differs from the others, the first few; else how it ran."""
    mine, theirs = _settings(run), [_settings(other) for other in others]
    if any(one != mine for one in theirs):
        known = dict.fromkeys(name for one in (mine, *theirs) for name in one)
        names = [k for k in known if any(one.get(k) != mine.get(k) for one in theirs)]
        words = [
            f"{name.rpartition('.')[2]} {_short(mine.get(name, 'none'))}" for name in names[:3]
        ]
        return [*words, *(["..."] if len(names) > 3 else [])]
    return [_fleet(run)] if len({_fleet(other) for other in others}) > 1 else []


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
