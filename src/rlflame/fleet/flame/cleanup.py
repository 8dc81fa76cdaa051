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
from .client import FlameClient


def remove_run(
    client: FlameClient,
    application: str,
    opened: Sequence[tuple[str, str]],
    drain_s: float,
    stop_lease: Callable[[], None],
) -> str:
    """Close sessions, delete objects, and last what those are found by; why not, or nothing.

    `opened` are the applications and their sessions, the first one first. `fall_silent` ends what
    would go on putting objects there.
    """
    deadline = time.monotonic() + drain_s
    newest_first = list(reversed(opened))
    # Results lie under the name of the application that ran; the rest under the first.
    prefixes = {application, *(name for name, _ in newest_first)}
    steps: list[Callable[[], None]] = [
        *(partial(client.close_session, session_id) for _, session_id in newest_first),
        stop_lease,
        *(partial(object_cache.delete, f"{name}/*") for name in prefixes),
        *(partial(client.unregister_application, name) for name, _ in newest_first),
    ]
    for step in steps:
        while True:
            try:
                step()
                break
            except FleetError as error:
                with contextlib.suppress(FleetError):
                    if not _has_run(client, newest_first):
                        break  # it never came to be
                # Refused while a task runs; workers look up every other second.
                if time.monotonic() > deadline:
                    return error.message.rstrip(".")
                time.sleep(0.2)
    return ""


def _has_run(client: FlameClient, opened: Sequence[tuple[str, str]]) -> bool:
    """Whether the cluster knows anything of this run."""
    sessions = {session.id for session in client.list_sessions()}
    return any(
        session_id in sessions or client.get_application(name) is not None
        for name, session_id in opened
    )
