"""Learner processes that communicate with torch.distributed and start quickly.

A server process loads torch once and forks each learner. A learner takes one run after another.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator

from rlflame.errors import LearnerFailure
from rlflame.learning.parallel.process_group import ProcessGroup, SingleProcessGroup

JOINING_S = 60.0
PATIENCE = {"deadline_s": JOINING_S, "join_timeout_s": JOINING_S, "clock": time.monotonic}


def _learn(rank: int, size: int, port: int) -> None:
    from meetings import HERE

    from rlflame.experiment.learners import replica_main
    from rlflame.experiment.learners.liveness import TcpRendezvous
    from rlflame.learning.parallel.torch_process_group import TorchProcessGroup

    store = TcpRendezvous(HERE, port).open_store(JOINING_S)
    group = TorchProcessGroup(rank, size, **PATIENCE, store=store)
    with contextlib.suppress(LearnerFailure):  # until the first learner ends
        while True:
            replica_main.learn(group)


@contextlib.contextmanager
def gathered(size: int) -> Iterator[ProcessGroup]:
    """A group of `size` learners with this process as the first one."""
    if size == 1:
        yield SingleProcessGroup()
        return
    from meetings import HERE, hosted

    from rlflame.learning.parallel.torch_process_group import TorchProcessGroup

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting, store = hosted(socket.create_server((HERE, 0)))
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(
        ["rlflame.learning.parallel.torch_process_group", "rlflame.learning.factory"]
    )
    others = [
        server.Process(target=_learn, args=(rank, size, meeting.port), daemon=True)
        for rank in range(1, size)
    ]
    for other in others:
        other.start()
    try:
        group = TorchProcessGroup(0, size, **PATIENCE, store=store)
        try:
            yield group
        finally:
            group.close()
    finally:
        for other in others:
            other.kill()
            other.join()
