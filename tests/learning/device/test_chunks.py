"""The arrays of several updates, which the host fills while the device reads earlier ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlflame.learning.device import chunks
from rlflame.learning.device.chunks import ChunkBuffers


class Event:
    """A CUDA event whose calls are listed."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def synchronize(self):
        self.calls.append(f"wait for {self.name}")

    def record(self, stream):
        self.calls.append(f"record {self.name} on {stream}")


def make_buffers():
    return ChunkBuffers([(2, 3), (4,)], torch.device("cpu"))


def test_updates_are_read_in_order_with_their_bits():
    buffers, rng = make_buffers(), np.random.default_rng(0)
    for count in (chunks.CHUNK_UPDATES, 3, 1):
        written = []
        for _ in range(count):
            arrays = buffers.add()
            for array in arrays:
                array[...] = rng.standard_normal(array.shape)
            # Bits that are no number, and those of an integer.
            arrays[1][:2] = np.array([0x7FA00001, 7], np.int32).view(np.float32)
            written.append([array.tobytes() for array in arrays])
        assert buffers.is_full == (count == chunks.CHUNK_UPDATES)
        buffers.send()
        for expected in written:
            assert [tensor.numpy().tobytes() for tensor in buffers.read()] == expected


def test_a_discarded_update_is_not_sent():
    buffers = make_buffers()
    buffers.add()[1][:] = 1.0
    buffers.discard_unsent()
    buffers.add()[1][:] = 2.0
    buffers.send()
    assert buffers.read()[1].tolist() == [2.0] * 4


def test_a_buffer_is_filled_again_only_after_its_copy(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    buffers = make_buffers()
    buffers._copies = [Event("a", calls), Event("b", calls)]
    for _ in range(3):
        buffers.add()
        buffers.add()
        buffers.send()
    assert calls == [
        *("wait for a", "record a on stream"),
        *("wait for b", "record b on stream"),
        *("wait for a", "record a on stream"),
    ]


@pytest.mark.parametrize(("limit", "updates"), [(2**26, 8), (100, 2), (1, 1)])
def test_large_updates_are_sent_in_smaller_groups(limit, updates, monkeypatch):
    """An update has ten numbers, which take 40 bytes."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", limit)
    buffers = make_buffers()
    for _ in range(updates):
        assert not buffers.is_full
        buffers.add()
    assert buffers.is_full
