"""The workers that have answered a run, each compared with this machine when it is new.

Must not know: tasks, connections, how anything is shown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rlflame.rollout.machine import read_versions


class WorkerRegistry:
    """Who works for a run, as far as they have answered.

    Executors come and go, and nobody says which have gone; but there are at most `most` at a time,
    so of more than that the ones that have not answered for longest are no more. When there seem to
    be as many, it is asked how much `room` there is now: nodes may have joined. Those of a node
    that has left stay counted until others have taken their places. `told` hears the number of
    those that are there, `warn` a topic and what to say of it once.
    """

    def __init__(
        self,
        max_workers: int,
        count_room: Callable[[], int],
        on_count: Callable[[int], None],
        warn: Callable[[str, str], None],
    ) -> None:
        self._max_workers = max_workers
        self._count_room = count_room
        self._on_count = on_count
        self._warn = warn
        self._lock = threading.Lock()
        self._workers: dict[str, dict[str, Any]] = {}

    def list_workers(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._workers.values())

    def add(self, worker: dict[str, Any]) -> None:
        if "python" not in worker:  # it could not start the process that would say
            return
        with self._lock:
            is_full = (
                worker["name"] not in self._workers and len(self._workers) >= self._max_workers
            )
        room = self._count_room() if is_full else 0
        with self._lock:
            self._max_workers = max(self._max_workers, room)
            is_known = self._workers.pop(worker["name"], None) is not None
            self._workers[worker["name"]] = worker
            has_excess = len(self._workers) > self._max_workers
            if has_excess:
                del self._workers[next(iter(self._workers))]
            count = len(self._workers)
        if is_known:
            return
        if not has_excess:
            self._on_count(count)
        local_versions = read_versions()
        differ = [
            f"{name} {worker.get(name)} (here {local_versions[name]})"
            for name in local_versions
            if name != "python"
            and worker.get(name) != local_versions[name]
            # What one of the two lacks has no part in what both can run.
            and "absent" not in (worker.get(name), local_versions[name])
        ]
        if differ:
            self._warn(
                f"differs {differ}",
                f"the worker on {worker['host']} differs in {', '.join(differ)}: results can "
                "differ in their last bits from a run on this machine",
            )
        worker_python, local_python = (
            _parse_minor(str(worker.get("python", ""))),
            _parse_minor(local_versions["python"]),
        )
        if worker_python != local_python:
            self._warn(
                f"python {worker_python}",
                f"the worker on {worker['host']} runs Python {worker_python} (here "
                f"{local_python}): rlflame's own "
                "bits do not depend on it, an environment's may",
            )


def _parse_minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
