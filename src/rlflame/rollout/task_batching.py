"""Merges the tasks of several slots into one, and splits the resulting fragment.

For a step of eight rows, numpy's call overhead takes longer than the arithmetic, and the header of
a message takes longer than its content. Merged slots share both costs. Results do not change,
because each slot has separate matrix products and no other operation mixes rows.
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

#: The maximum number of rows that step together. More rows save little time.
_MAX_ROWS = 32
#: The same for whole episodes, whose arrays have the length of the longest episode.
_MAX_EPISODES = 16


def merge_tasks(tasks: Sequence[RolloutTask], workers: int) -> list[RolloutTask]:
    """Merge neighbouring tasks, as long as there is enough work for every worker.

    Whole episodes have unequal lengths, so later groups of episodes are smaller. All workers then
    finish at about the same time. The sizes of these groups are powers of two, because a worker
    keeps separate environments for each size.
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
            # Round down to a power of two.
            limit = 1 << max(limit, 1).bit_length() - 1
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
    """Yield the fragment of each slot, as if the slot had been run alone."""
    if not fragment.extra_slots:
        yield fragment
        return
    slots = (fragment.slot, *fragment.extra_slots)
    rows = len(fragment.lengths) // len(slots)
    for number, slot in enumerate(slots):
        yield _extract_slot(fragment, slot, slice(number * rows, (number + 1) * rows))


def _can_merge(task: RolloutTask) -> bool:
    """Return whether a task may be merged without a change in its results."""
    # Whole episodes are merged only for rlflame's MuJoCo loop. Otherwise, each row needs its own
    # instance.
    policy, env = task.policy, task.env
    is_known = known_spaces.is_known_id(env.id) and not env.kwargs and not env.wrappers
    return (
        task.purpose == "train"
        and (task.unit == "steps" or is_known)
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
