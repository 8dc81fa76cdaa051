"""Places where learners meet inside the tests: a port as torchrun has it, or a file."""

from __future__ import annotations

import socket

from torch.distributed import Store, TCPStore

from rlflame.experiment.learners.liveness import Port

HERE = "127.0.0.1"


def hosted(listening: socket.socket) -> tuple[Port, Store]:
    """A meeting where this process listens, open as long as the store is held."""
    meeting = Port(*listening.getsockname())
    store = TCPStore(
        meeting.host,
        meeting.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return meeting, store
