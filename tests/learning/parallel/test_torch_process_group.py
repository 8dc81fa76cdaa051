"""The group over torch.distributed: its device, and its state after failures."""

from __future__ import annotations

import socket
import time

import gloo
import numpy as np
import pytest
from meetings import HERE, hosted
from torch import distributed

from rlflame.errors import LearnerFailure
from rlflame.learning.parallel.process_group import release_replicas
from rlflame.learning.parallel.torch_process_group import TorchProcessGroup, select_backend


@pytest.mark.parametrize(
    ("device", "places", "backend"),
    [
        ("cpu", [b"here", b"here"], "gloo"),
        ("cuda:0", [b"first card", b"second card"], "nccl"),
        ("cuda:1", [b"first card", b"second card", b"second card"], "gloo"),
    ],
)
def test_cards_exchange_by_nccl_unless_two_learners_share_one(device, places, backend):
    assert select_backend(device, places) == backend


def test_a_meeting_that_fails_is_not_in_the_way_of_the_next():
    for _ in range(2):
        _, store = hosted(socket.create_server((HERE, 0)))
        with pytest.raises(LearnerFailure, match="The 2 learners could not connect"):
            TorchProcessGroup(
                0, 2, deadline_s=1.0, join_timeout_s=1.0, clock=time.monotonic, store=store
            )
        assert not distributed.is_initialized()
    with gloo.gathered(2) as group:
        release_replicas(group)
    assert not distributed.is_initialized()


def test_arrays_of_many_sizes_keep_few_buffers():
    _, store = hosted(socket.create_server((HERE, 0)))
    group = TorchProcessGroup(0, 1, **gloo.PATIENCE, store=store)
    try:
        for size in range(1, 200):
            values = np.arange(size, dtype=np.float32)
            assert group.gather(values).tolist() == [values.tolist()]
        assert len(group._gather_buffers) <= 64
    finally:
        group.close()
    assert not distributed.is_initialized()
