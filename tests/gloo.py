"""Learners as processes that meet over torch.distributed, without the seconds that loading takes.

One server loads torch, and forks itself for every learner; a learner takes one run after the other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator

from rlflame.errors import LearnersLost
from rlflame.learning.parallel.process_group import Alone, Group

JOINING_S = 60.0
PATIENCE = {"deadline_s": JOINING_S, "joining_s": JOINING_S, "clock": time.monotonic}


def _learn(rank: int, size: int, port: int) -> None:
    from meetings import HERE

    from rlflame.experiment.learners import replica_main
    from rlflame.experiment.learners.liveness import Port
    from rlflame.learning.parallel.torch_process_group import TorchGroup

    store = Port(HERE, port).store(JOINING_S)
    group = TorchGroup(rank, size, **PATIENCE, store=store)
    with contextlib.suppress(LearnersLost):  # the first has gone
        while True:
            replica_main.learn(group)


@contextlib.contextmanager
def gathered(size: int) -> Iterator[Group]:
    """So many learners, this process the first of them. Release them after each run."""
    if size == 1:
        yield Alone()
        return
    from meetings import HERE, hosted

    from rlflame.learning.parallel.torch_process_group import TorchGroup

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
        group = TorchGroup(0, size, **PATIENCE, store=store)
        try:
            yield group
        finally:
            group.close()
    finally:
        for other in others:
            other.kill()
            other.join()
