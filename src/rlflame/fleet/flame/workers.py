"""The workers that have answered a run, each compared with this machine when it is new.

Must not know: tasks, connections, how anything is shown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rlflame.rollout.child import versions


class Workers:
    """Whom a run has met. `told` hears their number, `warn` a topic and what to say of it once."""

    def __init__(self, told: Callable[[int], None], warn: Callable[[str, str], None]) -> None:
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
            known = worker["name"] in self._known
            self._known[worker["name"]] = worker
            count = len(self._known)
        if known:
            return
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
