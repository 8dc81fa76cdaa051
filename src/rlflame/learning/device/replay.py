"""A copy of a replay buffer on a device, where updates gather their transitions.

The buffer in CPU memory stays complete: checkpoints are written from it, and it draws the samples.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflame.rollout.task import Array, Float32

from ..base import Transitions
from ..buffers.replay_buffer import ReplayBuffer, ReplayShape

#: New transitions are sent in parts of at most this many.
_PART_TRANSITIONS = 4096
#: The GPU memory that stays free for everything else: this fraction, and at least this many bytes.
_FREE_FRACTION, _FREE_BYTES = 0.1, 2**30


@dataclass(frozen=True, slots=True)
class TransitionLayout:
    """The columns of a table that holds one transition per row.

    Minibatches have this layout even if the replay is not on the device, because the kernels of a
    GPU, and thus the last bits of its results, can depend on how matrices lie in memory.
    """

    observation_size: int
    action_size: int

    @property
    def width(self) -> int:
        return 2 * self.observation_size + self.action_size + 3

    def split(self, rows: Any) -> list[Any]:
        """Return views of the columns, in the order of the fields of `Transitions`."""
        size, end = self.observation_size, self.observation_size + self.action_size
        observations, actions, next_observations = (
            rows[:, :size],
            rows[:, size:end],
            rows[:, end:-3],
        )
        return [observations, actions, rows[:, -3], next_observations, rows[:, -2]]

    def get_ends(self, rows: Any) -> Any:
        """Return a view of the column that is 1 where an episode ends, and otherwise 0."""
        return rows[:, -1]

    def write(self, transitions: Transitions, rows: Float32) -> None:
        """Copy transitions to the rows of an array."""
        for view, name in zip(self.split(rows), Transitions.__slots__, strict=True):
            view[...] = getattr(transitions, name)


class DeviceReplay:
    """The transitions over one step that a replay buffer can sample, in a table on a device."""

    def __init__(self, buffer: ReplayBuffer, device: torch.device) -> None:
        shape = buffer.shape
        self._buffer, self._columns = buffer, shape.columns
        self._layout = TransitionLayout(shape.observation_size, shape.action_size)
        #: The number of rows. A position is in row `position % self._count`.
        self._count = shape.rows * shape.columns
        self._table = torch.zeros((self._count, self._layout.width), device=device)
        self._discounts = torch.from_numpy(buffer.powers).to(device)
        self._first_row, self._size = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)
        )
        self._load_count, self._end = buffer.load_count, 0
        is_gpu = device.type == "cuda"
        part = min(self._count, _PART_TRANSITIONS), self._layout.width
        self._part = torch.empty(part, pin_memory=is_gpu)
        self._part_array: Float32 = self._part.numpy()
        self._copy = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    def is_source(self, draw: Any) -> bool:
        """Return whether `draw` is the method of the buffer that this copies."""
        return bool(draw == self._buffer.draw)

    def send_new(self) -> None:
        """Copy the transitions that were added since the last call to the device."""
        buffer, stop = self._buffer, self._buffer.total_added
        if buffer.load_count != self._load_count:
            self._load_count, self._end = buffer.load_count, 0
        # Copy the latest steps again: the buffer now has the observations that follow them.
        first = max(self._end - self._columns, stop - buffer.size)
        for start in range(first, stop, len(self._part)):
            self._send(start, min(start + len(self._part), stop))
        self._end = stop
        self._first_row.fill_((stop - buffer.size) % self._count)
        self._size.fill_(buffer.size)

    def _send(self, first: int, stop: int) -> None:
        if self._copy is not None:
            self._copy.synchronize()  # an earlier copy may still read the array
        rows, part = self._part_array[: stop - first], self._part[: stop - first]
        out = Transitions(*self._layout.split(rows))
        self._buffer.copy_steps(first, stop, out, self._layout.get_ends(rows))
        start = first % self._count
        count = min(len(part), self._count - start)
        self._table[start : start + count].copy_(part[:count], non_blocking=True)
        if count < len(part):
            self._table[: len(part) - count].copy_(part[count:], non_blocking=True)
        if self._copy is not None:
            self._copy.record(torch.cuda.current_stream(self._table.device))

    def draw_rows(self, update: int) -> Array:
        """Draw the int32 row numbers of one update's transitions."""
        return (self._buffer.draw_positions(update) % self._count).astype(np.int32)

    def gather(self, row_numbers: Tensor) -> list[Tensor]:
        """Return the transitions from `draw_rows` as tensors, in the order of `split`.

        A CUDA graph can capture this.
        """
        row_numbers = row_numbers.to(torch.int64)
        rows = self._table.index_select(0, row_numbers)
        first: list[Tensor] = self._layout.split(rows)
        if len(self._discounts) == 2:
            return first
        # Count from the oldest transition, so that no later step has a lower number.
        places = (row_numbers - self._first_row) % self._count
        counts = torch.zeros_like(places)
        is_running = torch.ones_like(places, dtype=torch.bool)
        rewards = first[2]
        # Add rewards in the same order as `TransitionRing.gather`.
        for discount in self._buffer.powers[1:-1].tolist():
            next_places = places + self._columns
            is_running = is_running & (self._layout.get_ends(rows) == 0.0)
            is_running = is_running & (next_places < self._size)
            places = torch.where(is_running, next_places, places)
            rows = self._table.index_select(0, (places + self._first_row) % self._count)
            reward = self._layout.split(rows)[2]
            rewards = torch.where(is_running, rewards + discount * reward, rewards)
            counts = counts + is_running
        *_, next_observations, bootstrap = self._layout.split(rows)
        discounts = self._discounts[1:].index_select(0, counts)
        bootstrap = torch.where(bootstrap == 0.0, 0.0, discounts)
        return [*first[:2], rewards, next_observations, bootstrap]


def count_replay_bytes(shape: ReplayShape) -> int:
    """Return the memory that a copy of a replay takes on a device."""
    layout = TransitionLayout(shape.observation_size, shape.action_size)
    return 4 * shape.rows * shape.columns * layout.width


def measure_free_bytes(device: torch.device) -> int:
    """Return the memory that a replay may take on a GPU. A CPU, used in tests, has no limit."""
    if device.type != "cuda":
        return sys.maxsize
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return max(0, free_bytes - max(_FREE_BYTES, int(_FREE_FRACTION * total_bytes)))
