"""Divides the (network, shard) units of a gradient among the learners of a group.

Units are numbered network by network, and each learner computes a contiguous range of them. The
learner that computes the first shard of a network is the network's owner: only the owner adds the
shards, in order, and updates the weights of the network. Sums, norms and weights do not depend on
the number of learners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from rlflame.rollout.task import Float32

from ..base import Metrics
from ..optim import compute_square_norm
from .process_group import Shard, Shards

#: Yields the gradient of some networks and the sums of their losses, for each of several shards.
PartialGradients = Callable[[Sequence[Shard], Sequence[str]], Iterator[tuple[Float32, Metrics]]]


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
        self._row: Float32 = np.zeros(self._width, np.float32)
        #: For each network: the squared norm of its gradient, and its sums.
        self._numbers = np.zeros((len(self._names), 1 + self._sum_count))
        self._message: Float32 = self._numbers.view(np.float32)
        self.divide()

    def divide(self) -> None:
        """Divide the units among the learners of the current group."""
        count, self._group = self._shards.count, self._shards.group
        self._is_alone = self._group.size == 1
        self._per_learner = -(-len(self._names) * count // self._group.size)
        starts = [number * count for number in range(len(self._names))]
        self._owners = [unit // self._per_learner for unit in starts]
        #: Whether several learners compute shards of one network.
        self._is_spread = any(
            (start + count - 1) // self._per_learner != owner
            for start, owner in zip(starts, self._owners, strict=True)
        )
        self._own_numbers = [n for n, owner in enumerate(self._owners) if owner == self._group.rank]
        self._own_names = [self._names[number] for number in self._own_numbers]
        #: The spans of the networks that this learner owns; for a single learner, the whole vector.
        own_spans = [self._spans[number] for number in self._own_numbers]
        self.own_spans = [slice(None)] if self._is_alone else own_spans
        width = self._width + 2 * self._sum_count
        self._parts: Float32 = np.zeros((self._per_learner, width), np.float32)

    def compute_gradient(
        self, rows: int, compute_parts: PartialGradients
    ) -> tuple[Float32, list[float], Metrics]:
        """Return the gradient, and the squared norms and the sums of all networks."""
        # The gradient is valid only in `own_spans`, until the next call.
        shards = self._shards.split(rows)
        if self._is_spread and len(shards) > 1:
            gradient, sums = self._add_spread_shards(shards, compute_parts)
        elif self._own_numbers:
            gradient, sums = self._add_own_shards(compute_parts(shards, self._own_names))
        else:
            gradient, sums = self._total, {}
        if self._is_alone:
            return gradient, [compute_square_norm(gradient[span]) for span in self._spans], sums
        return gradient, *self._exchange_numbers(gradient, sums)

    def _add_own_shards(self, parts: Iterator[tuple[Float32, Metrics]]) -> tuple[Float32, Metrics]:
        """Return the gradient and the sums of the networks that this learner owns.

        This learner computes all shards of these networks.
        """
        gradient, sums = next(parts)
        for part, part_sums in parts:
            for span in self.own_spans:
                np.add(gradient[span], part[span], out=self._total[span])
            gradient = self._total
            sums = {name: total + part_sums[name] for name, total in sums.items()}
        return gradient, sums

    def _add_spread_shards(
        self, shards: Sequence[Shard], compute_parts: PartialGradients
    ) -> tuple[Float32, Metrics]:
        """Return the gradient and the sums of the networks that this learner owns.

        They are added over the shards of all learners.
        """
        count, per_learner, parts = self._shards.count, self._per_learner, self._parts
        first = self._group.rank * per_learner

        def find_own_numbers(shard: Shard) -> list[int]:
            units = [number * count + shard.number for number in range(len(self._names))]
            return [n for n, unit in enumerate(units) if first <= unit < first + per_learner]

        for numbers, group in groupby(shards, key=find_own_numbers):
            if not numbers:
                continue
            own_shards, names = list(group), [self._names[number] for number in numbers]
            gradients = compute_parts(own_shards, names)
            for shard, (gradient, sums) in zip(own_shards, gradients, strict=True):
                for number in numbers:
                    part, span = parts[number * count + shard.number - first], self._spans[number]
                    part[: span.stop - span.start] = gradient[span]
                    # The float64 sums follow the gradient as pairs of float32 values.
                    values = [sums[name] for name in self._sums[number]]
                    part[self._width :].view(np.float64)[: len(values)] = values
        rows = self._group.gather(parts).reshape(-1, parts.shape[1])
        all_sums: Metrics = {}
        for number in self._own_numbers:
            own_rows = rows[number * count :][:count]
            total = self._total[self._spans[number]]
            total[:] = own_rows[0, : len(total)]
            for row in own_rows[1:]:
                total += row[: len(total)]
            totals = dict.fromkeys(self._sums[number], 0.0)
            for values in own_rows[:, self._width :].copy().view(np.float64).tolist():
                for name, value in zip(totals, values, strict=False):
                    totals[name] += value
            all_sums |= totals
        return self._total, all_sums

    def _exchange_numbers(self, gradient: Float32, sums: Metrics) -> tuple[list[float], Metrics]:
        """Return the squared norms and the sums of all networks, each from its owner."""
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
        """Copy updated weights from their owners if several learners share a network."""
        if self._is_spread:
            self.share_vector(parameters)

    def share_vector(self, vector: Float32) -> None:
        """Copy each network's part of a vector from the owner of the network."""
        if self._is_alone:
            return
        for number in self._own_numbers:  # at most one
            span = self._spans[number]
            self._row[: span.stop - span.start] = vector[span]
        rows = self._group.gather(self._row)
        for number, span in enumerate(self._spans):
            if number not in self._own_numbers:
                vector[span] = rows[self._owners[number], : span.stop - span.start]

    def compute_values(
        self, rows: int, chunk_rows: int, compute_chunk: Callable[[slice], Float32]
    ) -> Float32:
        """Return one value per row; each learner computes some chunks of the shards."""
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
