"""A minibatch in a fixed number of parts, so that any number of learners ends in the same bits.

A sum of float32 numbers depends on its order. So how a minibatch is cut is part of the recipe, each
shard is computed from its first to its last operation by one learner, and everybody adds the
shards in the order of their numbers. Must not know: algorithms, processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlflame.errors import LearningError
from rlflame.rollout.spec import Float32

from ..base import Metrics, State, compute_digest
from .process_group import ProcessGroup, SingleProcessGroup


class Shard(NamedTuple):
    """A part of a minibatch: its number, and its rows."""

    number: int
    rows: slice


class Shards:
    """Cuts, hands out, gathers and adds. With one shard all of that is nothing."""

    def __init__(self, count: int = 1, group: ProcessGroup | None = None) -> None:
        self.count = count
        self._group: ProcessGroup = SingleProcessGroup() if group is None else group
        self._shards_per_learner = count // self._group.size
        self._sent: Float32 = np.empty((0, 0), np.float32)
        self._total: Float32 = np.empty(0, np.float32)
        self._compare: Callable[[], None] = _skip_comparison

    @property
    def rank(self) -> int:
        """Of this learner."""
        return self._group.rank

    def compare_every(self, updates: int, state: Callable[[], State]) -> None:
        """From now on see to it that all learners hold the same bytes after so many updates."""
        self._compare = _StateComparison(self._group, updates, state)

    def finish_batch(self) -> None:
        """A batch is learned from."""
        self._compare()

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

        `part` divides by the size of the whole minibatch, so the sum is the mean over its samples
        however unequal the shards are; whoever clips it clips the whole.
        """
        self._compare()
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


def _skip_comparison() -> None:
    """Nobody asked for a comparison."""


class _StateComparison:
    """That all learners hold the same bytes, every so many updates."""

    def __init__(self, group: ProcessGroup, every: int, state: Callable[[], State]) -> None:
        self._group = group
        self._every = every
        self._state = state
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls % self._every:
            return
        digest = np.frombuffer(bytearray.fromhex(compute_digest(self._state())), np.float32)
        digests = self._group.gather(digest)
        different = [
            rank for rank, row in enumerate(digests) if row.tobytes() != digests[0].tobytes()
        ]
        if different:
            raise LearningError(
                f"Learners {', '.join(map(str, different))} hold other weights than learner 0.",
                "their machines must be of one kind: rlflame inspect names what a run was made on",
            )
