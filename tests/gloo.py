"""Learners as processes that meet over torch.distributed, without the seconds that loading takes.

One server loads torch, and forks itself for every learner; a learner takes one run after the other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

from rlflame.errors import LearnersLost
from rlflame.learner.group import Alone, Group

JOINING_S = 60.0


def _learn(rank: int, size: int, meeting: str) -> None:
    from rlflame import follower
    from rlflame.learner.torch_group import TorchGroup

    group = TorchGroup(rank, size, deadline_s=JOINING_S, joining_s=JOINING_S, file=meeting)
    with contextlib.suppress(LearnersLost):  # the first has gone
        while True:
            follower.learn(group)


@contextlib.contextmanager
def gathered(size: int, folder: Path) -> Iterator[Group]:
    """So many learners, this process the first of them. Release them after each run."""
    if size == 1:
        yield Alone()
        return
    from rlflame.learner.torch_group import TorchGroup

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = str(folder / f"meeting-{size}")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["rlflame.learner.torch_group", "rlflame.learners"])
    others = [
        server.Process(target=_learn, args=(rank, size, meeting), daemon=True)
        for rank in range(1, size)
    ]
    for other in others:
        other.start()
    try:
        group = TorchGroup(0, size, deadline_s=JOINING_S, joining_s=JOINING_S, file=meeting)
        try:
            yield group
        finally:
            group.close()
    finally:
        for other in others:
            other.kill()
            other.join()
