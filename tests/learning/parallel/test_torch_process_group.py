"""The group over torch.distributed: where it exchanges, and what it leaves when it fails."""

from __future__ import annotations

import socket
import time

import gloo
import pytest
from meetings import HERE, hosted
from torch import distributed

from rlflame.errors import LearnersLost
from rlflame.learning.parallel.replicated import release
from rlflame.learning.parallel.torch_process_group import TorchGroup, backend_for


@pytest.mark.parametrize(
    ("device", "places", "backend"),
    [
        ("cpu", [b"here", b"here"], "gloo"),
        ("cuda:0", [b"first card", b"second card"], "nccl"),
        ("cuda:1", [b"first card", b"second card", b"second card"], "gloo"),
    ],
)
def test_cards_exchange_by_nccl_unless_two_learners_share_one(device, places, backend):
    assert backend_for(device, places) == backend


def test_a_meeting_that_fails_is_not_in_the_way_of_the_next():
    for _ in range(2):
        _, store = hosted(socket.create_server((HERE, 0)))
        with pytest.raises(LearnersLost, match="The 2 learners did not come together"):
            TorchGroup(0, 2, deadline_s=1.0, joining_s=1.0, clock=time.monotonic, store=store)
        assert not distributed.is_initialized()
    with gloo.gathered(2) as group:
        release(group)
    assert not distributed.is_initialized()
