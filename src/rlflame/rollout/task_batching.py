"""Several slots stepped together: their tasks as one, and its fragment taken apart again.

A step of eight rows costs more in numpy's calls than in numbers, and a message more in its header
than in what it carries; with some slots side by side that is shared. A slot's bits are those it has
alone: each has matrix products of its own, and in all else no row is touched by another. Must not
know: how tasks are run, who runs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from .mujoco import known_spaces
from .spec import Fragment, RolloutTask

#: Rows that are stepped together; more gain little.
_MOST_ROWS = 32
#: Of whole episodes, which take memory for the longest of them.
_MOST_EPISODES = 16


def stacked(tasks: Sequence[RolloutTask], workers: int) -> list[RolloutTask]:
    """The same tasks, neighbours joined as far as every worker still has some.

    Episodes end when they like: so that workers end together, the later ones are joined in smaller
    and smaller groups, of few sizes, because a worker keeps environments for each.
    """
    found: list[RolloutTask] = []
    at = 0
    while at < len(tasks):
        first = tasks[at]
        if not _joins(first):
            room = 1
        elif first.unit == "steps":
            room = min(math.ceil(len(tasks) / workers), _MOST_ROWS // first.rows)
        else:
            room = min((len(tasks) - at) // workers, _MOST_EPISODES // first.rows)
            room = 1 << max(room, 1).bit_length() - 1  # the power of two that is not above it
        end = at + 1
        while end < min(len(tasks), at + room) and _alike(first, tasks[end]):
            end += 1
        found.append(_joined(tasks[at:end]))
        at = end
    return found


def apart(fragment: Fragment) -> Iterator[Fragment]:
    """The fragments of its slots, as if each had run alone."""
    if not fragment.beside:
        yield fragment
        return
    slots = (fragment.slot, *fragment.beside)
    rows = len(fragment.lengths) // len(slots)
    for number, slot in enumerate(slots):
        yield _share(fragment, slot, slice(number * rows, (number + 1) * rows))


def _joins(task: RolloutTask) -> bool:
    """Numbers that a slot's row has whatever else is stepped; of environments that may be heavy no
    whole episodes, since each row is an instance.
    """
    policy = task.policy
    return (
        task.purpose == "train"
        and (task.unit == "steps" or (known_spaces.is_named(task.env.id) and not task.env.kwargs))
        and task.first_row == 0
        and task.rows in (1, policy.width)
        and policy.exploration == "independent"
    )


def _alike(task: RolloutTask, other: RolloutTask) -> bool:
    return task == replace(other, slot=task.slot, states=task.states)


def _joined(tasks: Sequence[RolloutTask]) -> RolloutTask:
    if len(tasks) == 1:
        return tasks[0]
    states = tuple(chain.from_iterable(task.states for task in tasks))
    return replace(tasks[0], beside=tuple(task.slot for task in tasks[1:]), states=states)


def _share(fragment: Fragment, slot: int, mine: slice) -> Fragment:
    first, last = mine.start, mine.stop
    lengths = fragment.lengths[mine]
    steps = int(lengths.max())  # whole episodes of other slots may be longer
    # In memory as if it had come alone, so that whoever adds up adds in the same order.
    arrays: dict[str, Any] = {
        name: np.ascontiguousarray(getattr(fragment, name)[:steps, mine])
        for name in (
            "observations", "actions", "log_probs", "rewards", "terminated", "truncated",
        )
    }  # fmt: skip
    columns = fragment.boundary_index[:, 1]
    ends = (columns >= first) & (columns < last)
    return replace(
        fragment,
        slot=slot,
        beside=(),
        **arrays,
        lengths=lengths,
        last_observations=fragment.last_observations[mine],
        boundary_index=fragment.boundary_index[ends] - (0, first),
        boundary_observations=fragment.boundary_observations[ends],
        episodes=tuple(
            replace(episode, row=episode.row - first)
            for episode in fragment.episodes
            if first <= episode.row < last
        ),
        states=fragment.states[mine],
    )
