"""Sends the arrays of many updates to a device in one copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlflame.rollout.task import Float32

#: The arrays of at most this many updates, and of at most this many bytes, are sent together. With
#: more updates, the device would wait longer for the first ones.
CHUNK_UPDATES, CHUNK_BYTES = 8, 2**26


class ChunkBuffers:
    """The float32 arrays of several updates, on the host and on the device.

    The host has two buffers, and fills one while the device works on the chunk from the other.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._sizes = [math.prod(shape) for shape in shapes]
        row = sum(self._sizes)
        shape = max(1, min(CHUNK_UPDATES, CHUNK_BYTES // (4 * row))), row
        is_gpu = device.type == "cuda"
        buffers = [torch.empty(shape, pin_memory=is_gpu) for _ in range(2)]
        #: Arrays that share the memory of both buffers: one per update and shape.
        self._arrays: list[list[list[Float32]]] = [
            [[part.numpy() for part in self._split(row)] for row in buffer] for buffer in buffers
        ]
        self._buffers = buffers
        self._copies = [torch.cuda.Event() if is_gpu else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._chunk = torch.empty(shape, device=device)
        #: The number of the update to read next, on the device.
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self._turn = self._count = 0

    @property
    def is_full(self) -> bool:
        return self._count == len(self._chunk)

    def add(self) -> list[Float32]:
        """Add an update; return its arrays on the host, which the caller must fill."""
        event = self._copies[self._turn]
        if event is not None and not self._count:
            event.synchronize()  # an earlier copy may still read this buffer
        self._count += 1
        return self._arrays[self._turn][self._count - 1]

    def discard_unsent(self) -> None:
        """Discard the arrays that have not been sent."""
        self._count = 0

    def send(self) -> None:
        """Copy the arrays to the device; `read` then starts at the first update."""
        buffer, event = self._buffers[self._turn], self._copies[self._turn]
        self._chunk[: self._count].copy_(buffer[: self._count], non_blocking=True)
        if event is not None:
            event.record(torch.cuda.current_stream(self._chunk.device))
        self.index.zero_()
        self._turn, self._count = self._turn ^ 1, 0

    def read(self) -> list[Tensor]:
        """Return the arrays of the next update; a CUDA graph can capture this."""
        row = self._chunk.index_select(0, self.index)[0]
        self.index += 1
        return self._split(row)

    def _split(self, row: Tensor) -> list[Tensor]:
        """Return a view of each array in a row."""
        parts: Sequence[Tensor] = torch.split(row, self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
