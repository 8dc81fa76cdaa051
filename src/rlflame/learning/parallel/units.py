"""The (network, shard) units of a gradient, divided between learners.

Units are numbered network by network, and each learner computes a contiguous range of them. The
learner that computes the first shard of a network is its owner: it adds the shards in order,
and it alone steps the network's weights. Sums, norms and weights do not depend on the number of
learners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlflame.rollout.task import Float32

from ..base import Metrics
from ..optim import compute_square_norm
from .process_group import Shard, Shards

#: The gradient of these networks for a shard, and the sums of their losses.
PartialGradient = Callable[[Shard, Sequence[str]], tuple[Float32, Metrics]]


class Units:
    """Divides the gradient of networks that lie one behind the other in a vector."""

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
        #: By network: the square of its gradient's norm, and its sums.
        self._numbers = np.zeros((len(self._names), 1 + self._sum_count))
        self._message: Float32 = self._numbers.view(np.float32)
        self.divide()

    def divide(self) -> None:
        """Divide the units between the learners of the present group."""
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
        #: Where the networks lie that this learner steps; of a single learner, the whole vector.
        own_spans = [self._spans[number] for number in self._own_numbers]
        self.own_spans = [slice(None)] if self._is_alone else own_spans
        width = self._width + 2 * self._sum_count
        self._parts: Float32 = np.zeros((self._per_learner, width), np.float32)

    def compute_gradient(
        self, rows: int, compute_part: PartialGradient
    ) -> tuple[Float32, list[float], Metrics]:
        """Return the gradient, the squares of all networks' norms, and their sums."""
        # The gradient is valid in the own spans until the next call.
        shards = self._shards.split(rows)
        if len(shards) > 1:
            gradient, sums = self._add_shards(shards, compute_part)
        elif self._own_numbers:
            gradient, sums = compute_part(shards[0], self._own_names)
        else:
            gradient, sums = self._total, {}
        if self._is_alone:
            return gradient, [compute_square_norm(gradient[span]) for span in self._spans], sums
        return gradient, *self._exchange_numbers(gradient, sums)

    def _add_shards(
        self, shards: Sequence[Shard], compute_part: PartialGradient
    ) -> tuple[Float32, Metrics]:
        """The sum over the shards, for the own networks."""
        count, per_learner, parts = self._shards.count, self._per_learner, self._parts
        first = self._group.rank * per_learner
        for shard in shards:
            units = [number * count + shard.number for number in range(len(self._names))]
            numbers = [n for n, unit in enumerate(units) if first <= unit < first + per_learner]
            if not numbers:
                continue
            gradient, sums = compute_part(shard, [self._names[number] for number in numbers])
            for number in numbers:
                part, span = parts[units[number] - first], self._spans[number]
                part[: span.stop - span.start] = gradient[span]
                # The doubles of the sums stand behind the gradient, bit for bit.
                values = [sums[name] for name in self._sums[number]]
                part[self._width :].view(np.float64)[: len(values)] = values
        all_parts = parts if not self._is_spread else self._group.gather(parts)
        rows = all_parts.reshape(-1, parts.shape[1])
        first_row = 0 if self._is_spread else first
        all_sums: Metrics = {}
        for number in self._own_numbers:
            own_rows = rows[number * count - first_row :][:count]
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
        """The squares and the sums of all networks, each from its owner."""
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
        """Take the weights that their owners stepped, where this learner needs them."""
        if self._is_spread:
            self.share_vector(parameters)

    def share_vector(self, vector: Float32) -> None:
        """Fill every network's part of a vector from the owner of the network."""
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
        """A number for each row; each learner computes chunks, each within a shard."""
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
