"""The workers that have answered a run, each compared with this machine when it is new.

Must not know: tasks, connections, how anything is shown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rlflame.rollout.process.worker_main import versions


class Workers:
    """Who works for a run, as far as they have answered.

    Executors come and go, and nobody says which have gone; but there are at most `most` at a time,
    so of more than that the ones that have not answered for longest are no more. When there seem to
    be as many, it is asked how much `room` there is now: nodes may have joined. Those of a node
    that has left stay counted until others have taken their places. `told` hears the number of
    those that are there, `warn` a topic and what to say of it once.
    """

    def __init__(
        self,
        most: int,
        room: Callable[[], int],
        told: Callable[[int], None],
        warn: Callable[[str, str], None],
    ) -> None:
        self._most = most
        self._room = room
        self._told = told
        self._warn = warn
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}

    def seen(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._known.values())

    def met(self, worker: dict[str, Any]) -> None:
        if "python" not in worker:  # it could not start the process that would say
            return
        with self._lock:
            full = worker["name"] not in self._known and len(self._known) >= self._most
        room = self._room() if full else 0
        with self._lock:
            self._most = max(self._most, room)
            known = self._known.pop(worker["name"], None) is not None
            self._known[worker["name"]] = worker
            gone = len(self._known) > self._most
            if gone:
                del self._known[next(iter(self._known))]
            count = len(self._known)
        if known:
            return
        if not gone:
            self._told(count)
        here = versions()
        differ = [
            f"{name} {worker.get(name)} (here {here[name]})"
            for name in here
            if name != "python"
            and worker.get(name) != here[name]
            # What one of the two lacks has no part in what both can run.
            and "absent" not in (worker.get(name), here[name])
        ]
        if differ:
            self._warn(
                f"differs {differ}",
                f"the worker on {worker['host']} differs in {', '.join(differ)}: results can "
                "differ in their last bits from a run on this machine",
            )
        theirs, ours = _minor(str(worker.get("python", ""))), _minor(here["python"])
        if theirs != ours:
            self._warn(
                f"python {theirs}",
                f"the worker on {worker['host']} runs Python {theirs} (here {ours}): rlflame's own "
                "bits do not depend on it, an environment's may",
            )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
