"""Divides the gradients of several networks among the learners of a group.

A unit is the gradient of one network for one shard. Units are numbered network by network, and each
learner computes a contiguous range of them. If no network is divided among several learners, each
learner also updates the weights of its networks. Otherwise, each learner is assigned one part of
the whole vector: it adds the gradients of all shards for this part, in shard order, and updates the
weights of this part. Sums, norms and weights do not depend on the number of learners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from rlflame.rollout.task import Float32

from ..base import Metrics
from ..optim import compute_square_norm
from .process_group import ProcessGroup, Shard, Shards, SharedMemory

#: The gradients of adjacent shards `[shards, parameters]`, and the sums of their losses.
ShardGradients = tuple[Float32, Sequence[Metrics]]
#: Yields the gradients of some networks for all given shards, in order; each result is valid until
#: the next one.
PartialGradients = Callable[[Sequence[Shard], Sequence[str]], Iterator[ShardGradients]]
#: The size of each part of a vector is a multiple of a cache line (16 numbers).
_PART_STEP = 16


class Units:
    """Divides the gradient of several networks that are adjacent in one vector."""

    def __init__(
        self, shards: Shards, spans: Mapping[str, slice], sums: Mapping[str, Sequence[str]]
    ) -> None:
        self._shards = shards
        self._names, self._spans = tuple(spans), tuple(spans.values())
        self._sums = tuple(tuple(sums[name]) for name in self._names)
        self._width = max(span.stop - span.start for span in self._spans)
        self._sum_count = max(map(len, self._sums))
        self._total: Float32 = np.empty(max(span.stop for span in self._spans), np.float32)
        #: For each network: the squared norm of its gradient, and its sums.
        self._numbers = np.zeros((len(self._names), 1 + self._sum_count))
        self._message: Float32 = self._numbers.view(np.float32)
        self._memory: SharedMemory | None = None
        self._memory_group: ProcessGroup | None = None
        self.divide()

    def divide(self) -> None:
        """Divide the units among the learners of the current group."""
        count, self._group = self._shards.count, self._shards.group
        size, rank = self._group.size, self._group.rank
        self._is_alone = size == 1
        self._per_learner = -(-len(self._names) * count // size)
        starts = [number * count for number in range(len(self._names))]
        self._owners = [unit // self._per_learner for unit in starts]
        #: Whether several learners compute shards of one network.
        self._is_spread = any(
            (start + count - 1) // self._per_learner != owner
            for start, owner in zip(starts, self._owners, strict=True)
        )
        self._own_numbers = [n for n, owner in enumerate(self._owners) if owner == rank]
        #: The networks whose gradients this learner computes.
        first, end = rank * self._per_learner, (rank + 1) * self._per_learner
        self.own_names = [
            name
            for name, start in zip(self._names, starts, strict=True)
            if start < end and first < start + count
        ]
        #: The parts of the vector whose weights this learner updates.
        self.own_spans = [self._spans[number] for number in self._own_numbers]
        row_size, total_size = self._width, len(self._total)
        if self._is_alone:
            self.own_spans = [slice(None)]
        elif self._is_spread:
            row_size = -(-total_size // (size * _PART_STEP)) * _PART_STEP
            part = (min(n * row_size, total_size) for n in (rank, rank + 1))
            self.own_spans = [slice(*part)]
        self._row: Float32 = np.zeros(row_size, np.float32)
        width = self._width + 2 * self._sum_count
        self._parts: Float32 = np.zeros((self._per_learner, width), np.float32)

    @property
    def shard_count(self) -> int:
        return self._shards.count

    @property
    def is_alone(self) -> bool:
        """Whether this learner computes all units."""
        return self._is_alone

    @property
    def memory(self) -> SharedMemory | None:
        """The memory of the current group, if there is any."""
        return self._memory if self._group is self._memory_group else None

    def share_memory(self, size: int) -> None:
        """Share memory between two learners that compute one network each, if both use it.

        All learners of a group call this method. A learner that does not use the memory passes 0.
        """
        if self._is_spread or not 1 < self._group.size == len(self._names):
            return
        if self._group is not self._memory_group:
            share = self._group.share_memory
            can_share = size > 0 and share is not None
            is_used = self._group.gather(np.array([can_share], np.float32)).all()
            self._memory = share(size) if share is not None and is_used else None
            self._memory_group = self._group

    def compute_gradient(
        self, rows: int, compute_parts: PartialGradients
    ) -> tuple[Float32, list[float], Metrics]:
        """Return the gradient, the squared norm of each network's gradient, and the sums."""
        # The gradient is valid only in `own_spans` and only until the next call.
        shards = self._shards.split(rows)
        if self._is_spread:
            gradient, sums = self._add_spread_shards(shards, compute_parts)
        elif self._own_numbers:
            gradient, sums = self._add_own_shards(shards, compute_parts)
        else:
            gradient, sums = self._total, {}
        if self._is_alone or self._is_spread:
            return gradient, [compute_square_norm(gradient[span]) for span in self._spans], sums
        return gradient, *self._exchange_numbers(gradient, sums)

    def _add_own_shards(
        self, shards: Sequence[Shard], compute_parts: PartialGradients
    ) -> tuple[Float32, Metrics]:
        """Add up the gradients and sums of this learner's networks over all shards."""
        parts = compute_parts(shards, self.own_names)
        if len(shards) == 1:
            gradients, sums_of_shards = next(parts)
            return gradients[0], sums_of_shards[0]
        rows = (row for part in parts for row in zip(*part, strict=True))
        gradient, totals = next(rows)
        for span in self.own_spans:
            self._total[span] = gradient[span]
        for gradient, sums in rows:
            for span in self.own_spans:
                self._total[span] += gradient[span]
            totals = {name: total + sums[name] for name, total in totals.items()}
        return self._total, totals

    def _add_spread_shards(
        self, shards: Sequence[Shard], compute_parts: PartialGradients
    ) -> tuple[Float32, Metrics]:
        """Add up the gradients and sums of all networks over the shards of all learners."""
        count = self._shards.count
        self._compute_parts(shards, compute_parts)
        rows = self._group.gather(self._parts).reshape(-1, self._parts.shape[1])
        part, row = self.own_spans[0], self._row
        totals: Metrics = {}
        for number, (span, names) in enumerate(zip(self._spans, self._sums, strict=True)):
            own_rows = rows[number * count :][: len(shards)]
            # A learner's part may begin or end in the middle of a network.
            start, end = max(part.start, span.start), min(part.stop, span.stop)
            if start < end:
                columns = slice(start - span.start, end - span.start)
                total = row[start - part.start : end - part.start]
                total[:] = own_rows[0, columns]
                for shard_row in own_rows[1:]:
                    total += shard_row[columns]
            network_totals = dict.fromkeys(names, 0.0)
            for values in own_rows[:, self._width :].copy().view(np.float64).tolist():
                for name, value in zip(names, values, strict=False):
                    network_totals[name] += value
            totals |= network_totals
        np.copyto(self._total, self._group.gather(row).reshape(-1)[: len(self._total)])
        return self._total, totals

    def _compute_parts(self, shards: Sequence[Shard], compute_parts: PartialGradients) -> None:
        """Compute the gradients and sums of this learner's units, and store them by unit."""
        count, per_learner = self._shards.count, self._per_learner
        first = self._group.rank * per_learner

        def find_own_numbers(shard: Shard) -> list[int]:
            units = [number * count + shard.number for number in range(len(self._names))]
            return [n for n, unit in enumerate(units) if first <= unit < first + per_learner]

        for numbers, group in groupby(shards, key=find_own_numbers):
            if not numbers:
                continue
            own_shards, names = list(group), [self._names[number] for number in numbers]
            shard_number = own_shards[0].number
            for gradients, sums in compute_parts(own_shards, names):
                for number in numbers:
                    place, span = number * count + shard_number - first, self._spans[number]
                    own_parts = self._parts[place : place + len(gradients)]
                    own_parts[:, : span.stop - span.start] = gradients[:, span]
                    # The float64 sums follow the gradient as pairs of float32 values.
                    values = [[row[name] for name in self._sums[number]] for row in sums]
                    own_parts[:, self._width :].view(np.float64)[:, : len(values[0])] = values
                shard_number += len(gradients)

    def _exchange_numbers(self, gradient: Float32, sums: Metrics) -> tuple[list[float], Metrics]:
        """Gather each network's squared norm and sums from the learner that has them."""
        for number in self._own_numbers:
            values = [compute_square_norm(gradient[self._spans[number]])]
            values += [sums[name] for name in self._sums[number]]
            self._numbers[number, : len(values)] = values
        all_numbers = self._group.gather(self._message).view(np.float64).tolist()
        squares: list[float] = []
        all_sums: Metrics = {}
        for number, (owner, names) in enumerate(zip(self._owners, self._sums, strict=True)):
            square, *values = all_numbers[owner][number]
            squares.append(square)
            all_sums.update(zip(names, values, strict=False))
        return squares, all_sums

    def share_step(self, parameters: Float32) -> None:
        """Exchange the updated weights if several learners share a network."""
        if self._is_spread:
            self.share_vector(parameters)

    def share_vector(self, vector: Float32) -> None:
        """Copy each part of a vector from the learner that updates it."""
        if self._is_alone:
            return
        for span in self.own_spans:  # at most one
            self._row[: span.stop - span.start] = vector[span]
        rows = self._group.gather(self._row)
        if self._is_spread:
            vector[:] = rows.reshape(-1)[: len(vector)]
            return
        for number, span in enumerate(self._spans):
            if number not in self._own_numbers:
                vector[span] = rows[self._owners[number], : span.stop - span.start]

    def compute_values(
        self, rows: int, chunk_rows: int, compute_chunk: Callable[[slice], Float32]
    ) -> Float32:
        """Return one value per row; each learner computes some of the chunks."""
        chunks = [
            slice(start, min(start + chunk_rows, shard.rows.stop))
            for shard in self._shards.split(rows)
            for start in range(shard.rows.start, shard.rows.stop, chunk_rows)
        ]
        sizes = [chunk.stop - chunk.start for chunk in chunks]
        per_learner = -(-len(chunks) // self._group.size)
        parts: Float32 = np.zeros((per_learner, max(sizes)), np.float32)
        first = self._group.rank * per_learner
        for part, chunk in zip(parts, chunks[first:], strict=False):
            part[: chunk.stop - chunk.start] = compute_chunk(chunk)
        all_parts = self._group.gather(parts).reshape(-1, max(sizes))
        return np.concatenate([row[:size] for row, size in zip(all_parts, sizes, strict=False)])
