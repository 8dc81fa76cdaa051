"""The fleet that runs tasks on the executors of a Flame cluster."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import FleetError, FleetUnreachableError
from rlflame.fleet.base import ContextManagerMixin, FleetEvent, Observer, Traffic, ignore_event
from rlflame.fleet.job_queue import AnswerQueue, FleetJob, JobSubmission
from rlflame.rollout import blas, wire
from rlflame.rollout.machine import read_versions
from rlflame.rollout.task import PolicyArrays, RolloutTask

from .attempt import AttemptRunner, JobBoard
from .client import FlameClient, remove_run
from .cluster_config import TLS_FIX
from .object_cache import Lease
from .policy_store import PolicyStore
from .scheduler import Scheduler
from .session_starter import PREFIX, SessionStarter
from .timed_call import call_with_timeout, format_error

#: How long `close()` retries calls that the cluster rejects, and the time limit of the cleanup.
_DRAIN_S, _CLEAN_S = 12.0, 16.0
_START_END_S = 5.0


class FlameFleet(ContextManagerMixin):
    """Runs tasks on the executors of a cluster until `close()`."""

    name = "flame"

    def __init__(
        self, tasks: int | None, runtime: RuntimeSettings, *, observer: Observer = ignore_event
    ) -> None:
        self._observer = observer
        self._closed = False
        self._client = FlameClient().open()
        self._note(f"flame: using the cluster at {self._client.endpoint} ({self._client.source})")
        room = count_room(self._client, runtime)
        self.capacity = room if tasks is None else min(room, tasks)
        self._application = f"{PREFIX}{uuid.uuid4().hex[:12]}"
        self._lease = self._open_lease()
        settings = {
            "core": blas.read_core_name(),
            "step_deadline_s": runtime.step_deadline_s,
            "lease": self._lease.reference,
            "delay_release_s": float(runtime.flame.delay_release_s),
            "env_file": os.path.basename(runtime.env_file) if runtime.env_file else None,
        }
        self._starter = SessionStarter(self._client, self._application, settings, runtime, observer)
        self._policies = PolicyStore(f"{self._application}/shared", self._client.meter)
        self._workers = WorkerRegistry(room, partial(count_room, self._client, runtime), observer)
        board = JobBoard(observer)
        runner = AttemptRunner(self._client, self._starter, self._policies, board, runtime)
        self._scheduler = Scheduler(runner, self.capacity, self._workers.add)
        self._starter.thread.start()

    def _open_lease(self) -> Lease:
        address = self._client.cache_endpoint
        try:
            return Lease(self._application)
        except Exception as error:
            self._client.close()
            raise FleetUnreachableError(
                f"The object cache at {address} does not accept objects ({format_error(error)}).",
                f"{TLS_FIX}; rlflame cluster-check",
            ) from error

    @property
    def ready(self) -> bool:
        return self._starter.end_event.is_set()

    def put(self, policy: PolicyArrays) -> str:
        return self._policies.put(policy)

    def release(self, policy_id: str) -> None:
        self._policies.release(policy_id)

    def submit(self, tasks: Sequence[RolloutTask]) -> JobSubmission:
        answers: AnswerQueue = queue.SimpleQueue()
        jobs = [FleetJob(task, wire.encode(task), b"", answers) for task in tasks]
        self._policies.keep([task.policy_id for task in tasks])
        for task in tasks:
            self._observer(FleetEvent("submitted", task.purpose, task.slot))

        def finish() -> None:
            for task in tasks:
                self._policies.release(task.policy_id)

        self._scheduler.add(jobs)
        return JobSubmission(self._scheduler.board.cancel, jobs, answers, finish)

    def read_traffic(self) -> Traffic:
        """Return this process's traffic, without the weights that executors download."""
        return self._client.meter.read()

    def probe(self) -> list[dict[str, Any]]:
        """Return the descriptions of the workers that have answered so far."""
        if threading.current_thread() is not self._starter.thread:  # cannot wait for itself
            self._starter.wait()
        workers = self._workers.list_workers()
        if not workers and self._starter.session is not None:
            greeting = self._starter.session.greeting
            machine = {name: greeting[name] for name in ("host", "python", "libc")}
            workers = [{**greeting["packages"], **machine}]
        return workers

    def _note(self, text: str) -> None:
        self._observer(FleetEvent("note", "", 0, text))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._starter.stop_event.set()
        with contextlib.suppress(Exception):
            self._lease.announce_closing()
        self._scheduler.close()
        self._policies.deleter.close()
        self._starter.thread.join(_START_END_S)
        # A cluster that does not answer must not block the process.
        run, stop_lease = self._application, self._lease.close
        try:
            problem = call_with_timeout(
                lambda: remove_run(self._client, run, _DRAIN_S, stop_lease=stop_lease),
                _CLEAN_S,
                "clean up",
            )
        except FleetError as error:
            problem = error.message.rstrip(".")
        stop_lease()
        if problem:
            self._note(f"flame: {problem}; to clean up: rlflame cluster-check --clean")
        self._client.close()


def count_room(client: FlameClient, runtime: RuntimeSettings) -> int:
    """Return the number of executors that the settings and the nodes allow."""
    room = 0
    for node in client.call("list_nodes"):
        if node.status.state == 1:
            cpus = int(node.status.capacity.cpu)
            room += cpus // runtime.flame.cpu if runtime.flame.cpu else cpus or 1
    if runtime.workers is None:
        return max(room, 1)
    # The nodes' processors do not limit executors that request none.
    return runtime.workers if runtime.flame.cpu == 0 else min(runtime.workers, max(room, 1))


class WorkerRegistry:
    """Reports the number of workers, and how they differ from this machine.

    The cluster does not report which executors have ended. At most `max_workers` exist at a time,
    so if a new worker exceeds this limit, the worker whose latest answer is the oldest is dropped.
    `count_room` is called first, because the limit rises if nodes have joined. Workers on a removed
    node are counted until other workers replace them.
    """

    def __init__(self, max_workers: int, count_room: Callable[[], int], observer: Observer) -> None:
        self._max_workers = max_workers
        self._count_room = count_room
        self._observer = observer
        self._lock = threading.Lock()
        self._workers: dict[str, dict[str, Any]] = {}
        self._notes: set[str] = set()

    def list_workers(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._workers.values())

    def add(self, worker: dict[str, Any]) -> None:
        if "python" not in worker:  # the child process, which reports the versions, did not start
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
        remote, python = (".".join(str(w["python"]).split(".")[:2]) for w in (worker, local))
        differ = [f"Python {remote} (here {python})"] if remote != python else []
        for name, version in local.items():
            # A package that only one machine has cannot affect tasks that both can run.
            other = worker.get(name)
            if name != "python" and other != version and "absent" not in (other, version):
                differ.append(f"{name} {other} (here {version})")
        note = ", ".join(differ)
        with self._lock:
            is_new = bool(note) and note not in self._notes
            self._notes.add(note)
        if is_new:
            text = f"the worker on {worker['host']} differs in {note}: results may not be "
            self._observer(FleetEvent("note", "", 0, text + "bit-identical to a local run"))
