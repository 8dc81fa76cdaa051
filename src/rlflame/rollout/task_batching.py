"""Merges the tasks of several slots into one task, and splits its fragment again.

A step of eight rows takes more time in numpy's call overhead than in arithmetic, and a message more
in its header than in its content; merged slots share both. The bits of a slot do not change: each
has its own matrix products, and no other operation mixes rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from .mujoco import known_spaces
from .task import STEP_FIELDS, Fragment, RolloutTask

#: The most rows that step together; more gain little.
_MAX_ROWS = 32
#: The same for whole episodes, whose arrays have the length of the longest.
_MAX_EPISODES = 16


def merge_tasks(tasks: Sequence[RolloutTask], workers: int) -> list[RolloutTask]:
    """Merge neighbouring tasks as long as every worker still has some.

    Episodes have unequal lengths. So that all workers finish together, later tasks are merged in
    smaller and smaller groups. There are few sizes, because a worker keeps environments for each.
    """
    result: list[RolloutTask] = []
    start = 0
    while start < len(tasks):
        first = tasks[start]
        if not _can_merge(first):
            limit = 1
        elif first.unit == "steps":
            limit = min(math.ceil(len(tasks) / workers), _MAX_ROWS // first.rows)
        else:
            limit = min((len(tasks) - start) // workers, _MAX_EPISODES // first.rows)
            limit = (
                1 << max(limit, 1).bit_length() - 1
            )  # the largest power of two that is not greater
        end = start + 1
        while end < min(len(tasks), start + limit) and first == replace(
            tasks[end], slot=first.slot, states=first.states
        ):
            end += 1
        group = tasks[start:end]
        states = tuple(chain.from_iterable(task.states for task in group))
        merged_task = replace(first, extra_slots=tuple(t.slot for t in group[1:]), states=states)
        result.append(first if len(group) == 1 else merged_task)
        start = end
    return result


def split_fragment(fragment: Fragment) -> Iterator[Fragment]:
    """Return the fragments of the slots, as if each had run alone."""
    if not fragment.extra_slots:
        yield fragment
        return
    slots = (fragment.slot, *fragment.extra_slots)
    rows = len(fragment.lengths) // len(slots)
    for number, slot in enumerate(slots):
        yield _extract_slot(fragment, slot, slice(number * rows, (number + 1) * rows))


def _can_merge(task: RolloutTask) -> bool:
    """Return whether a task may be merged: its numbers must not depend on slots."""
    # Whole episodes of heavy environments are not merged: each row is an instance.
    policy = task.policy
    return (
        task.purpose == "train"
        and (
            task.unit == "steps" or (known_spaces.is_known_id(task.env.id) and not task.env.kwargs)
        )
        and task.first_row == 0
        and task.rows in (1, policy.width)
        and policy.exploration == "independent"
    )


def _extract_slot(fragment: Fragment, slot: int, slot_columns: slice) -> Fragment:
    first, last = slot_columns.start, slot_columns.stop
    lengths = fragment.lengths[slot_columns]
    steps = int(lengths.max())  # whole episodes of other slots may be longer
    # Copy to the memory layout of a single slot, so that sums use the same order.
    arrays: dict[str, Any] = {
        name: np.ascontiguousarray(getattr(fragment, name)[:steps, slot_columns])
        for name in STEP_FIELDS
    }
    columns = fragment.boundary_index[:, 1]
    in_slot = (columns >= first) & (columns < last)
    return replace(
        fragment,
        slot=slot,
        extra_slots=(),
        **arrays,
        lengths=lengths,
        last_observations=fragment.last_observations[slot_columns],
        boundary_index=fragment.boundary_index[in_slot] - (0, first),
        boundary_observations=fragment.boundary_observations[in_slot],
        episodes=tuple(
            replace(episode, row=episode.row - first)
            for episode in fragment.episodes
            if first <= episode.row < last
        ),
        states=fragment.states[slot_columns],
    )
