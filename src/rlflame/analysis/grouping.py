"""Which runs belong together: those of one recipe that differ in the seed alone.

Must not know: what is drawn or said of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.config import nested
from rlflame.storage.run_reader import Recorded
from rlflame.text import format_count

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
    ran, by what they lie in, or each by its folder.
    """
    found: list[list[Recorded]] = []
    for same in _split(runs, _recipe):
        found += _sampled(same, (_fleet, _parent))
    labels = _labels(found)
    return [
        Group(label, tuple(part), name if len(part) > 1 else label)
        for (label, name), part in zip(labels, found, strict=True)
    ]


def split(group: Group) -> list[Group]:
    """Each run by itself, under a name that tells its seed."""
    seeds = format_count(len(group.runs), "seed")
    labels = [group.label.replace(seeds, f"seed {run.seed}") for run in group.runs]
    return [Group(label, (run,), label) for label, run in zip(labels, group.runs, strict=True)]


def _split(runs: Sequence[Recorded], key: Callable[[Recorded], str]) -> Iterator[list[Recorded]]:
    parts: dict[str, list[Recorded]] = {}
    for run in runs:
        parts.setdefault(key(run), []).append(run)
    yield from parts.values()


def _sampled(
    runs: list[Recorded], apart: Sequence[Callable[[Recorded], str]]
) -> list[list[Recorded]]:
    """Runs of one recipe, told apart by one way after the other until no part has a seed twice."""
    if _seeds_differ(runs):
        return [runs]
    if not apart:
        return [[run] for run in runs]
    key, *further = apart
    return [part for same in _split(runs, key) for part in _sampled(same, further)]


def _seeds_differ(runs: Sequence[Recorded]) -> bool:
    return len({run.seed for run in runs}) == len(runs)


def _recipe(run: Recorded) -> str:
    return json.dumps(_settings(run), sort_keys=True, default=str)


def _settings(run: Recorded) -> dict[str, Any]:
    """The recipe as full names and values, without the seed and what is set to nothing."""
    named = nested.named(run.recipe)
    return {name: value for name, value in named if name != _SEED and value not in _NOTHING}


def _fleet(run: Recorded) -> str:
    """Where and with how many workers it ran last, as far as that is known."""
    last = run.machines[-1] if run.machines else {}
    fleet = last.get("fleet") or run.runtime.get("fleet") or "auto"
    workers = last.get("capacity") or run.counted("workers")
    return f"{fleet}, {format_count(workers, 'worker')}" if workers else str(fleet)


def _parent(run: Recorded) -> str:
    return str(run.folder.resolve().parent)


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
        words.append(f"seed {first.seed}" if len(part) == 1 else format_count(len(part), "seed"))
        labels.append(", ".join(words))
    for label in {label for label in labels if labels.count(label) > 1}:
        which = [i for i, other in enumerate(labels) if other == label]
        for i, place in zip(which, _ends([_place(found[i]) for i in which]), strict=True):
            labels[i], names[i] = f"{label} ({place})", f"{names[i]} ({place})"
    return list(zip(labels, names, strict=True))


def _place(part: Sequence[Recorded]) -> tuple[str, ...]:
    """Of a run its folder, of several what they lie in."""
    folder = part[0].folder.resolve()
    return (folder if len(part) == 1 else folder.parent).parts


def _ends(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """As much of each path, from its end, as tells it from the others."""
    for length in range(1, max(map(len, paths)) + 1):
        ends = ["/".join(path[-length:]) for path in paths]
        if len(set(ends)) == len(ends):
            return ends
    return ["/".join(path[-1:]) for path in paths]


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
