"""A minibatch in a fixed number of parts, so that any number of learners ends in the same bits.

A sum of float32 numbers depends on its order. So how a minibatch is cut is part of the recipe, each
shard is computed from its first to its last operation by one learner, and every learner adds the
shards in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlflame.errors import LearningError
from rlflame.rollout.task import Float32

from ..base import Metrics, State
from .process_group import ProcessGroup, SingleProcessGroup, find_deviating_ranks


class Shard(NamedTuple):
    """A part of a minibatch: its number, and its rows."""

    number: int
    rows: slice


class Shards:
    """Cuts minibatches, and gathers and adds gradients. With one shard it does nothing of that."""

    def __init__(self, count: int = 1, group: ProcessGroup | None = None) -> None:
        self.count = count
        self._group: ProcessGroup = SingleProcessGroup() if group is None else group
        self._shards_per_learner = count // self._group.size
        self._sent: Float32 = np.empty((0, 0), np.float32)
        self._total: Float32 = np.empty(0, np.float32)
        self._state: Callable[[], State] | None = None
        self._compared_updates = 1
        self._update_count = 0

    @property
    def rank(self) -> int:
        """Of this learner."""
        return self._group.rank

    def compare_every(self, updates: int, state: Callable[[], State]) -> None:
        """From now on check after every so many updates that all learners hold the same bytes."""
        self._state, self._compared_updates = state, updates

    def finish_batch(self) -> None:
        """End the updates of a batch."""
        self._compare_states()

    def split(self, rows: int) -> list[Shard]:
        """Nearly equal parts, the longer ones first. Too few rows for all shards stay together,
        and every learner computes them for itself."""
        if rows < self.count:
            return [Shard(0, slice(0, rows))]
        size, longer = divmod(rows, self.count)
        ends = [size * n + min(n, longer) for n in range(self.count + 1)]
        return [Shard(n, slice(ends[n], ends[n + 1])) for n in range(self.count)]

    def compute_gradient(
        self, rows: int, compute_part: Callable[[Shard], tuple[Float32, Metrics]]
    ) -> tuple[Float32, Metrics]:
        """The sum over the shards of their gradients and sums; valid until the next call.

        `compute_part` divides by the size of the whole minibatch, so the sum is the mean over its
        samples however unequal the shards are. It is the sum that is clipped.
        """
        self._compare_states()
        shards = self.split(rows)
        if len(shards) == 1:
            return compute_part(shards[0])
        sums: Metrics = {}
        for place, shard in enumerate(self._select_local(shards)):
            gradient, sums = compute_part(shard)
            self._pack_row(place, gradient, sums)
        all_rows = self._group.gather(self._sent).reshape(self.count, -1)
        return self._add_rows(all_rows, list(sums))

    def compute_values(self, rows: int, compute_part: Callable[[slice], Float32]) -> Float32:
        """A number for each row, the rows cut in the same way."""
        shards = self.split(rows)
        if len(shards) == 1:
            return compute_part(shards[0].rows)
        spans = [
            shards[n : n + self._shards_per_learner]
            for n in range(0, self.count, self._shards_per_learner)
        ]
        sizes = [span[-1].rows.stop - span[0].rows.start for span in spans]
        local_values: Float32 = np.zeros(max(sizes), np.float32)
        place = 0
        for shard in self._select_local(shards):
            part_values = compute_part(shard.rows)
            local_values[place : place + len(part_values)] = part_values
            place += len(part_values)
        all_values = self._group.gather(local_values)
        result: Float32 = np.concatenate(
            [learner_values[:size] for learner_values, size in zip(all_values, sizes, strict=True)]
        )
        return result

    def _compare_states(self) -> None:
        if self._state is None:
            return
        self._update_count += 1
        if self._update_count % self._compared_updates:
            return
        different = find_deviating_ranks(self._group, self._state())
        if different:
            raise LearningError(
                f"Learners {', '.join(map(str, different))} hold other weights than learner 0.",
                "their machines must be of one kind: rlflame inspect names what a run was made on",
            )

    def _select_local(self, shards: list[Shard]) -> list[Shard]:
        first = self._group.rank * self._shards_per_learner
        return shards[first : first + self._shards_per_learner]

    def _pack_row(self, place: int, gradient: Float32, sums: Metrics) -> None:
        """A row of what is sent: a gradient, and behind it the doubles of the sums, bit for bit."""
        width = len(gradient) + 2 * len(sums)
        if self._sent.shape != (self._shards_per_learner, width):
            self._sent = np.empty((self._shards_per_learner, width), np.float32)
            self._total = np.empty(len(gradient), np.float32)
        self._sent[place, : len(gradient)] = gradient
        self._sent[place, len(gradient) :] = np.array(list(sums.values())).view(np.float32)

    def _add_rows(self, all_rows: Float32, names: list[str]) -> tuple[Float32, Metrics]:
        size = len(self._total)
        self._total[:] = all_rows[0, :size]
        for gradient in all_rows[1:, :size]:
            self._total += gradient
        sums = dict.fromkeys(names, 0.0)
        for row in all_rows[:, size:].copy().view(np.float64):
            for name, value in zip(names, row, strict=True):
                sums[name] += float(value)
        return self._total, sums
