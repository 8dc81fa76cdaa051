"""The workers that have answered a run, each compared with this machine when it is new."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from rlflame.errors import FleetError
from rlflame.fleet.base import FleetEvent, Observer
from rlflame.rollout.machine import read_versions


class WorkerRegistry:
    """Tells an observer the number of workers, and once each way in which they differ from here.

    Executors come and go, and the cluster does not say which have gone. There are at most
    `max_workers` at a time, so of more than that, those that have not answered for longest are
    gone. When the registry is full, `count_room` is asked whether nodes have joined. Workers of a
    node that has left stay counted until others have taken their places.
    """

    def __init__(self, max_workers: int, count_room: Callable[[], int], observer: Observer) -> None:
        self._max_workers = max_workers
        self._count_room = count_room
        self._observer = observer
        self._lock = threading.Lock()
        self._workers: dict[str, dict[str, Any]] = {}
        self._noted_topics: set[str] = set()

    def list_workers(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._workers.values())

    def add(self, worker: dict[str, Any]) -> None:
        if "python" not in worker:  # it could not start the process that would say
            return
        name = worker["name"]
        with self._lock:
            is_full = name not in self._workers and len(self._workers) >= self._max_workers
        room = 0
        if is_full:
            with contextlib.suppress(FleetError):
                room = self._count_room()
        with self._lock:
            self._max_workers = max(self._max_workers, room)
            is_known = self._workers.pop(name, None) is not None
            self._workers[name] = worker
            has_excess = len(self._workers) > self._max_workers
            if has_excess:
                del self._workers[next(iter(self._workers))]
            count = len(self._workers)
        if is_known:
            return
        if not has_excess:
            self._observer(FleetEvent.of_workers(count))
        self._compare(worker, read_versions())

    def _compare(self, worker: dict[str, Any], local: dict[str, str]) -> None:
        differ = [
            f"{name} {worker.get(name)} (here {local[name]})"
            for name in local
            if name != "python"
            and worker.get(name) != local[name]
            # A package that one of the two lacks has no part in what both can run.
            and "absent" not in (worker.get(name), local[name])
        ]
        if differ:
            self._note_once(
                f"differs {differ}",
                f"the worker on {worker['host']} differs in {', '.join(differ)}: results can "
                "differ in their last bits from a run on this machine",
            )
        remote_python, local_python = (
            ".".join(str(versions.get("python", "")).split(".")[:2]) for versions in (worker, local)
        )
        if remote_python != local_python:
            self._note_once(
                f"python {remote_python}",
                f"the worker on {worker['host']} runs Python {remote_python} (here "
                f"{local_python}): rlflame's own bits do not depend on it, an environment's may",
            )

    def _note_once(self, topic: str, text: str) -> None:
        with self._lock:
            if topic in self._noted_topics:
                return
            self._noted_topics.add(topic)
        self._observer(FleetEvent("note", "", 0, text))
