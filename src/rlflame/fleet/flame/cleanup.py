"""Takes a run off its cluster, so that it is as it was before.

Must not know: tasks, policies, why the run ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from rlflame.errors import FleetError

from . import object_cache
from .client import Cluster


def withdraw(
    cluster: Cluster,
    application: str,
    opened: Sequence[tuple[str, str]],
    drain_s: float,
    fall_silent: Callable[[], None],
) -> str:
    """Close sessions, delete objects, and last what those are found by; why not, or nothing.

    `opened` are the applications and their sessions, the first one first. `fall_silent` ends what
    would go on putting objects there.
    """
    deadline = time.monotonic() + drain_s
    latest = list(reversed(opened))
    # Results lie under the name of the application that ran; the rest under the first.
    holders = {application, *(name for name, _ in latest)}
    steps: list[Callable[[], None]] = [
        *(partial(cluster.close_session, session_id) for _, session_id in latest),
        fall_silent,
        *(partial(object_cache.delete, f"{name}/*") for name in holders),
        *(partial(cluster.unregister, name) for name, _ in latest),
    ]
    for step in steps:
        while True:
            try:
                step()
                break
            except FleetError as error:
                with contextlib.suppress(FleetError):
                    if not _is_there(cluster, latest):
                        break  # it never came to be
                # Refused while a task runs; workers look up every other second.
                if time.monotonic() > deadline:
                    return error.message.rstrip(".")
                time.sleep(0.2)
    return ""


def _is_there(cluster: Cluster, opened: Sequence[tuple[str, str]]) -> bool:
    """Whether the cluster knows anything of this run."""
    sessions = {session.id for session in cluster.sessions()}
    return any(
        session_id in sessions or cluster.application(name) is not None
        for name, session_id in opened
    )
