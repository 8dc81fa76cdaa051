"""FlameFleet: the fleet contract on a Flame cluster."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from functools import partial

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import FleetUnreachableError
from rlflame.fleet.base import (
    ContextManagerMixin,
    FleetEvent,
    FleetReport,
    Observer,
    Traffic,
    ignore_event,
)
from rlflame.fleet.job_queue import AnswerQueue, FleetJob, JobSubmission
from rlflame.rollout import blas, wire
from rlflame.rollout.task import PolicyArrays, RolloutTask

from .attempt import JobBoard
from .client import FlameClient, remove_run
from .lease import Lease
from .policy_store import PolicyStore
from .scheduler import Scheduler
from .session_starter import PREFIX, SessionStarter
from .timed_call import format_error
from .worker_registry import WorkerRegistry

#: How long `close()` repeats what the cluster refuses, and how long it takes at most.
_DRAIN_S, _CLEAN_S = 12.0, 16.0
_START_END_S = 5.0


class FlameFleet(ContextManagerMixin):
    """Executors of a cluster, from construction to `close()`."""

    name = "flame"

    def __init__(
        self,
        tasks: int | None,
        runtime: RuntimeSettings,
        *,
        observer: Observer = ignore_event,
        advises: bool = True,
    ) -> None:
        """`advises`: whether to tell the user how less time would be lost."""
        self._observer = observer
        self._advises = advises
        self._closed = False
        #: What keeps the cluster from being as it was before; empty once it is clean.
        self._cleanup_problem = "the cluster did not answer"
        self._client = FlameClient().open()
        self._note(f"flame: the cluster at {self._client.endpoint} ({self._client.source})")
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
        self._board = JobBoard(observer)
        self._scheduler = Scheduler(
            self._client,
            self._starter,
            self._policies,
            self._workers,
            self._board,
            runtime,
            self.capacity,
        )
        self._starter.start_in_background()

    def _open_lease(self) -> Lease:
        try:
            return Lease(self._client.cache_endpoint, self._application)
        except Exception as error:
            self._client.close()
            raise FleetUnreachableError(
                f"The object cache at {self._client.cache_endpoint} does not take objects "
                f"({format_error(error)}).",
                self._client.format_cache_hint(),
            ) from error

    @property
    def ready(self) -> bool:
        return self._starter.has_finished

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
        started_at = time.monotonic()

        def finish(complete: bool) -> None:
            for task in tasks:
                self._policies.release(task.policy_id)
            if complete and tasks and tasks[0].purpose == "train":
                self._finish_round(time.monotonic() - started_at, len(tasks))

        self._scheduler.add(jobs)
        return JobSubmission(self._board.cancel, jobs, answers, finish)

    def _finish_round(self, wall_s: float, tasks: int) -> None:
        statistics = self._scheduler.statistics
        statistics.finish_round(wall_s, tasks)
        if self._advises and (advice := statistics.format_advice()):
            self._advises = False
            self._note(advice)

    def read_traffic(self) -> Traffic:
        """Between this process and the cluster, without the executors' fetching of weights."""
        return self._client.meter.read()

    def probe(self) -> FleetReport:
        """The workers that have answered; executors come and go."""
        if not self._starter.is_current_thread:
            self._starter.wait()
        workers = self._workers.list_workers()
        if not workers and self._starter.session is not None:
            greeting = self._starter.session.greeting
            machine = {name: greeting[name] for name in ("host", "python", "libc")}
            workers = [{**greeting["packages"], **machine}]
        return FleetReport(self.name, self.capacity, tuple(workers))

    def _note(self, text: str) -> None:
        self._observer(FleetEvent("note", "", 0, text))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._starter.stop()
        with contextlib.suppress(Exception):
            self._lease.announce_closing()
        self._scheduler.close()
        self._policies.deleter.close()
        self._starter.join(_START_END_S)
        cleaning = threading.Thread(target=self._clean, name="rlflame-clean", daemon=True)
        cleaning.start()
        # A cluster that does not answer must not hold the process.
        cleaning.join(timeout=_CLEAN_S)
        self._lease.close()
        if self._cleanup_problem:
            self._note(
                f"flame: {self._cleanup_problem}; rlflame cluster-check --clean removes what is "
                "left of this run"
            )
        self._client.close()

    def _clean(self) -> None:
        newest_first = list(reversed(self._starter.opened))
        self._cleanup_problem = remove_run(
            self._client,
            self._application,
            [application for application, _ in newest_first],
            [session_id for _, session_id in newest_first],
            timeout_s=_DRAIN_S,
            stop_lease=self._lease.close,
        )


def count_room(client: FlameClient, runtime: RuntimeSettings) -> int:
    """How many executors there can be at a time: within what the user allows and the nodes have."""
    room = 0
    for node in client.list_nodes():
        if node.status.state == 1:
            cpus = int(node.status.capacity.cpu)
            room += cpus // runtime.flame.cpu if runtime.flame.cpu else cpus or 1
    if runtime.workers is None:
        return max(room, 1)
    # Executors without processors are not bounded by the nodes'.
    return runtime.workers if runtime.flame.cpu == 0 else min(runtime.workers, max(room, 1))
