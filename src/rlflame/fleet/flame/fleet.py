"""FlameFleet: the fleet contract on a Flame cluster.

Keeps count of policies and submissions, opens and closes what a run has on the cluster; the desk
does the work. Must not know: algorithms, files of a run, displays.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlflame.errors import FleetError, FleetUnreachableError, RlflameError
from rlflame.fleet.base import (
    ContextManagerMixin,
    FleetEvent,
    FleetReport,
    Observer,
    Traffic,
    ignore_event,
    make_policy_id,
)
from rlflame.fleet.jobs import FleetJob
from rlflame.fleet.submission import JobSubmission
from rlflame.rollout import blas, wire
from rlflame.rollout.spec import Fragment, PolicyArrays, RolloutTask

from . import object_cache
from .attempt import ClusterUnreachableError
from .cleanup import remove_run
from .client import EXECUTOR_STATES, FlameClient
from .lease import Lease
from .object_cache import Reference
from .overhead import ClusterOverhead
from .scheduler import Scheduler
from .session_start import PREFIX, FlameOptions, FlameSession, SessionStarter
from .timed_call import ClusterCallError, format_error
from .worker_versions import WorkerRegistry

#: How long closing waits for tasks that still run, in all.
_DRAIN_S = 12.0
_CLEAN_S = 16.0


class FlameFleet(ContextManagerMixin):
    """Executors of a cluster, from construction to `close()`."""

    name = "flame"

    def __init__(
        self,
        tasks: int | None,
        options: FlameOptions,
        *,
        step_deadline_s: float = 60.0,
        task_deadline_s: float = 600.0,
        reconnect_s: float = 120.0,
        max_retries: int = 3,
        observer: Observer = ignore_event,
        advises: bool = True,
    ) -> None:
        """`advises`: whether to say where less of it would be lost; not where others see to it."""
        self._observer = observer
        self._advises = advises
        self._lock = threading.Lock()
        self._put_lock = threading.Lock()
        self._policies: dict[str, bytes] = {}
        self._references: dict[str, Reference] = {}
        self._uses: Counter[str] = Counter()
        self._noted_topics: set[str] = set()
        self._closed = False
        #: What keeps the cluster from being as it was before; empty once it is.
        self._cleanup_problem = "the cluster did not answer"
        self._start_done = threading.Event()
        self._flame_session: FlameSession | None = None
        self._start_error: RlflameError | None = None
        self._client = FlameClient().open()
        self._note(f"flame: the cluster at {self._client.endpoint} ({self._client.source})")
        room = self._count_room(options)
        self.capacity = room if tasks is None else min(room, tasks)
        self._workers = WorkerRegistry(
            room,
            lambda: self._count_current_room(options),
            lambda number: observer(FleetEvent.of_workers(number)),
            self._note_once,
        )
        self._application = f"{PREFIX}{uuid.uuid4().hex[:12]}"
        try:
            self._lease = Lease(self._client.cache_endpoint, self._application)
        except Exception as error:
            self._client.close()
            raise FleetUnreachableError(
                f"The object cache at {self._client.cache_endpoint} does not take objects "
                f"({format_error(error)}).",
                self._client.format_cache_hint(),
            ) from error
        settings = {
            "core": blas.read_core_name(),
            "step_deadline_s": step_deadline_s,
            "lease": self._lease.reference,
            "delay_release_s": float(options.delay_release_s),
            "env_file": os.path.basename(options.env_file) if options.env_file else None,
        }
        self._starter = SessionStarter(
            self._client,
            self._application,
            settings,
            options,
            self._report_phase,
            lambda: self._closed,
        )
        self._overhead = ClusterOverhead()
        self._scheduler = Scheduler(
            self._client,
            self._wait_for_session,
            self._put_policy,
            self._forget_reference,
            capacity=self.capacity,
            max_retries=max_retries,
            step_deadline_s=step_deadline_s,
            task_deadline_s=task_deadline_s,
            reconnect_s=reconnect_s,
            observer=observer,
            on_worker=self._workers.add,
            overhead=self._overhead,
            diagnose=self._diagnose_failures,
            on_stall=self._handle_stall,
        )
        self._thread = threading.Thread(target=self._start, name="rlflame-start", daemon=True)
        self._thread.start()

    def _count_room(self, options: FlameOptions) -> int:
        """How many executors there can be at a time: what was asked, and what is there."""
        room = 0
        for node in self._client.list_nodes():
            if node.status.state == 1:
                cpus = int(node.status.capacity.cpu)
                room += cpus // options.cpu if options.cpu else cpus or 1
        if options.max_executors is None:
            return max(room, 1)
        # Where the cluster does not count processors, they are no bound.
        return (
            options.max_executors if options.cpu == 0 else min(options.max_executors, max(room, 1))
        )

    def _count_current_room(self, options: FlameOptions) -> int:
        """One at least, who has just answered; a cluster that does not say has room for no more."""
        try:
            return self._count_room(options)
        except FleetError:
            return 1

    # Starting.

    def _start(self) -> None:
        try:
            started = self._starter.start()
        except RlflameError as error:
            self._start_error = error
        except Exception as error:
            self._start_error = FleetError(
                f"The fleet could not start: {error!r}.", "--debug shows where"
            )
        else:
            kilobytes = started.upload_bytes / 1000.0
            installation = "with its packages" if started.installed else "nothing to install"
            self._flame_session = started
            self._start_done.set()
            self._note(f"flame: sent {kilobytes:.0f} kB to the cluster, {installation}")
        self._start_done.set()
        if self._start_error is not None:
            self._scheduler.fail_all(self._start_error)
        self._report_phase("")

    @property
    def ready(self) -> bool:
        return self._start_done.is_set()

    def _wait_for_session(self) -> Any:
        """The session, once there is one."""
        self._start_done.wait()
        if self._flame_session is None:
            raise self._start_error or FleetError("The fleet was closed.")
        return self._flame_session.session

    # Policies.

    def put(self, policy: PolicyArrays) -> str:
        name = make_policy_id(policy)
        with self._lock:
            if name not in self._policies:
                self._policies[name] = wire.encode({"id": name, "arrays": dict(policy)})
            self._uses[name] += 1
        return name

    def release(self, policy_id: str) -> None:
        with self._lock:
            self._uses[policy_id] -= 1
            if self._uses[policy_id] > 0:
                return
            del self._uses[policy_id]
            self._policies.pop(policy_id, None)
            reference = self._references.pop(policy_id, None)
        if reference is not None:
            self._scheduler.delete_object(reference.key)

    def _put_policy(self, policy_id: str) -> Reference:
        """Where a policy lies; put there once, by whoever needs it first."""
        with self._put_lock:
            with self._lock:
                reference, content = self._references.get(policy_id), self._policies.get(policy_id)
            if reference is not None:
                return reference
            if content is None:
                raise FleetError("Nobody holds these weights any more.")
            reference = object_cache.put(f"{self._application}/shared", content)
            self._client.meter.count_sent(len(content))
            with self._lock:
                is_held = policy_id in self._policies
                if is_held:
                    self._references[policy_id] = reference
            if not is_held:  # released meanwhile
                self._scheduler.delete_object(reference.key)
                raise FleetError("Nobody holds these weights any more.")
            return reference

    def _forget_reference(self, policy_id: str, reference: Reference | None) -> None:
        """They could not be had there; by now they may lie elsewhere."""
        with self._lock:
            if self._references.get(policy_id) != reference:
                return
            self._references.pop(policy_id, None)
        if reference is not None:  # the cache may only have been away
            self._scheduler.delete_object(reference.key)

    # Tasks.

    def submit(self, tasks: Sequence[RolloutTask]) -> JobSubmission:
        answers: queue.SimpleQueue[Fragment | RlflameError | None] = queue.SimpleQueue()
        jobs = [FleetJob(task, wire.encode(task), b"", answers) for task in tasks]
        if self._start_error is not None:
            raise self._start_error
        with self._lock:
            unknown_ids = [task.policy_id for task in tasks if task.policy_id not in self._policies]
            if unknown_ids:
                raise KeyError(unknown_ids[0])
            # Held until the submission is over: a release never pulls weights from under it.
            self._uses.update(task.policy_id for task in tasks)
        for task in tasks:
            self._observer(FleetEvent("submitted", task.purpose, task.slot))
        started_at = time.monotonic()

        def finish(complete: bool) -> None:
            for task in tasks:
                self.release(task.policy_id)
            if complete and tasks and tasks[0].purpose == "train":
                self._overhead.finish_round(
                    time.monotonic() - started_at, len(tasks), self.capacity
                )
                if self._advises:
                    self._note_once("overhead", self._overhead.format_advice())

        self._scheduler.add(jobs)
        return JobSubmission(self._scheduler, jobs, answers, finish)

    def read_traffic(self) -> Traffic:
        """Between this process and the cluster; an executor's fetching of weights is its own."""
        return self._client.meter.read()

    def probe(self) -> FleetReport:
        """Of the workers that have answered; executors come and go."""
        if threading.current_thread() is not self._thread:  # an observer asks while it is told
            self._wait_for_session()
        workers = self._workers.list_workers()
        if not workers and self._flame_session is not None:
            greeting = self._flame_session.greeting
            workers = [
                {**greeting["packages"], **{k: greeting[k] for k in ("host", "python", "libc")}}
            ]
        return FleetReport(self.name, self.capacity, tuple(workers))

    # What is told.

    def _note_once(self, topic: str, text: str) -> None:
        with self._lock:
            if not text or topic in self._noted_topics:
                return
            self._noted_topics.add(topic)
        self._note(text)

    def _note(self, text: str) -> None:
        self._observer(FleetEvent("note", "", 0, text))

    def _report_phase(self, text: str) -> None:
        self._observer(FleetEvent("phase", "", 0, text))

    def _handle_stall(self, waited_s: float) -> None:
        if self._flame_session is not None:
            with contextlib.suppress(ClusterCallError):
                self._starter.handle_stall(self._flame_session, waited_s)

    def _diagnose_failures(self, reason: str) -> RlflameError:
        """Why task after task fails: an executor whose process died fails all it is given."""
        for server, check in (
            ("session manager", self._client.list_nodes),
            ("object cache", lambda: object_cache.put(f"{self._application}/shared", b"?")),
        ):
            try:
                check()
            except FleetError as error:
                return ClusterUnreachableError(
                    f"The {server} does not answer any more: {error.message}",
                    "rlflame cluster-check, then rlflame resume",
                )
        executors_text = ""
        with contextlib.suppress(FleetError):
            executors = [
                f"{executor.spec.node} ({EXECUTOR_STATES[executor.status.state]})"
                for executor in self._client.list_executors()
                if self._flame_session
                and executor.status.session_id == self._flame_session.session_id
            ]
            executors_text = f" Executors of this run: {', '.join(sorted(executors)) or 'none'}."
        return FleetError(
            f"Task after task failed on the cluster, the last with: {reason}.{executors_text} A "
            "worker "
            "process that died makes its executor fail everything it is given.",
            "stop the executor manager of that node for more than 30 s, start it again, and "
            "rlflame resume; rlflame cluster-check names the node",
        )

    # The end.

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            self._lease.announce_closing()
        self._scheduler.close()
        self._thread.join(timeout=5.0)
        cleaning = threading.Thread(target=self._clean, name="rlflame-clean", daemon=True)
        cleaning.start()
        # A cluster that does not answer must not hold the process.
        cleaning.join(timeout=_CLEAN_S)
        self._lease.close()
        if self._cleanup_problem:
            self._note(
                f"flame: {self._cleanup_problem}; rlflame cluster-check --clean removes what is "
                "left of this "
                "run"
            )
        self._client.close()

    def _clean(self) -> None:
        self._cleanup_problem = remove_run(
            self._client, self._application, self._starter.opened, _DRAIN_S, self._lease.close
        )
