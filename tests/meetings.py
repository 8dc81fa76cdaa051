"""Rendezvous points for learners in tests: a port, as with torchrun, or a file."""

from __future__ import annotations

import socket

from torch.distributed import Store, TCPStore

from rlflame.experiment.learners.liveness import TcpRendezvous

HERE = "127.0.0.1"


def hosted(listening: socket.socket) -> tuple[TcpRendezvous, Store]:
    """A rendezvous that this process hosts, for as long as the store exists."""
    meeting = TcpRendezvous(*listening.getsockname())
    store = TCPStore(
        meeting.host,
        meeting.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return meeting, store
