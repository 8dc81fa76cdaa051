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

from rlflame.errors import FleetError, FleetUnreachable, RlflameError
from rlflame.fleet.base import (
    Closing,
    FleetEvent,
    FleetReport,
    Observer,
    Traffic,
    ignore,
    policy_id,
)
from rlflame.fleet.jobs import Job
from rlflame.rollout import blas, wire
from rlflame.rollout.spec import Fragment, PolicyArrays, RolloutTask

from . import object_cache
from .attempt import Away
from .cleanup import withdraw
from .client import EXECUTOR_STATES, Cluster
from .lease import Lease
from .object_cache import Reference
from .overhead import Overhead
from .scheduler import Desk
from .session_start import PREFIX, Started, Starter, Wishes
from .submission import FlameSubmission
from .timeouts import Unanswered, said
from .worker_versions import Workers

#: How long closing waits for tasks that still run, in all.
_DRAIN_S = 12.0
_CLEAN_S = 16.0


class FlameFleet(Closing):
    """Executors of a cluster, from construction to `close()`."""

    name = "flame"

    def __init__(
        self,
        tasks: int | None,
        wishes: Wishes,
        *,
        step_deadline_s: float = 60.0,
        task_deadline_s: float = 600.0,
        reconnect_s: float = 120.0,
        max_retries: int = 3,
        observer: Observer = ignore,
        advises: bool = True,
    ) -> None:
        """`advises`: whether to say where less of it would be lost; not where others see to it."""
        self._observer = observer
        self._advises = advises
        self._lock = threading.Lock()
        self._placing = threading.Lock()
        self._policies: dict[str, bytes] = {}
        self._places: dict[str, Reference] = {}
        self._uses: Counter[str] = Counter()
        self._said: set[str] = set()
        self._closed = False
        #: What keeps the cluster from being as it was before; empty once it is.
        self._left = "the cluster did not answer"
        self._settled = threading.Event()
        self._started: Started | None = None
        self._failed: RlflameError | None = None
        self._cluster = Cluster().open()
        self._note(f"flame: the cluster at {self._cluster.endpoint} ({self._cluster.source})")
        room = self._room(wishes)
        self.capacity = room if tasks is None else min(room, tasks)
        self._workers = Workers(
            room,
            lambda: self._room_now(wishes),
            lambda number: observer(FleetEvent("workers", "", 0, str(number))),
            self._note_once,
        )
        self._application = f"{PREFIX}{uuid.uuid4().hex[:12]}"
        try:
            self._lease = Lease(self._cluster.cache_endpoint, self._application)
        except Exception as error:
            self._cluster.close()
            raise FleetUnreachable(
                f"The object cache at {self._cluster.cache_endpoint} does not take objects "
                f"({said(error)}).",
                self._cluster.cache_hint(),
            ) from error
        settings = {
            "core": blas.core_name(),
            "step_deadline_s": step_deadline_s,
            "lease": self._lease.reference,
            "delay_release_s": float(wishes.delay_release_s),
            "env_file": os.path.basename(wishes.env_file) if wishes.env_file else None,
        }
        self._starter = Starter(
            self._cluster, self._application, settings, wishes, self._phase, lambda: self._closed
        )
        self._overhead = Overhead()
        self._desk = Desk(
            self._cluster,
            self._session,
            self._place,
            self._forget_place,
            capacity=self.capacity,
            max_retries=max_retries,
            step_deadline_s=step_deadline_s,
            task_deadline_s=task_deadline_s,
            reconnect_s=reconnect_s,
            observer=observer,
            met=self._workers.met,
            overhead=self._overhead,
            trouble=self._trouble,
            stalled=self._stalled,
        )
        self._thread = threading.Thread(target=self._start, name="rlflame-start", daemon=True)
        self._thread.start()

    def _room(self, wishes: Wishes) -> int:
        """How many executors there can be at a time: what was asked, and what is there."""
        room = 0
        for node in self._cluster.nodes():
            if node.status.state == 1:
                cpus = int(node.status.capacity.cpu)
                room += cpus // wishes.cpu if wishes.cpu else cpus or 1
        if wishes.most is None:
            return max(room, 1)
        # Where the cluster does not count processors, they are no bound.
        return wishes.most if wishes.cpu == 0 else min(wishes.most, max(room, 1))

    def _room_now(self, wishes: Wishes) -> int:
        """One at least, who has just answered; a cluster that does not say has room for no more."""
        try:
            return self._room(wishes)
        except FleetError:
            return 1

    # Starting.

    def _start(self) -> None:
        try:
            started = self._starter.start()
        except RlflameError as error:
            self._failed = error
        except Exception as error:
            self._failed = FleetError(
                f"The fleet could not start: {error!r}.", "--debug shows where"
            )
        else:
            kilobytes = started.upload_bytes / 1000.0
            how = "with its packages" if started.installed else "nothing to install"
            self._started = started
            self._settled.set()
            self._note(f"flame: sent {kilobytes:.0f} kB to the cluster, {how}")
        self._settled.set()
        if self._failed is not None:
            self._desk.end(self._failed)
        self._phase("")

    @property
    def ready(self) -> bool:
        return self._settled.is_set()

    def _session(self) -> Any:
        """The session, once there is one."""
        self._settled.wait()
        if self._started is None:
            raise self._failed or FleetError("The fleet was closed.")
        return self._started.session

    # Policies.

    def put(self, policy: PolicyArrays) -> str:
        name = policy_id(policy)
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
            place = self._places.pop(policy_id, None)
        if place is not None:
            self._desk.throw_away(place.key)

    def _place(self, policy_id: str) -> Reference:
        """Where a policy lies; put there once, by whoever needs it first."""
        with self._placing:
            with self._lock:
                place, content = self._places.get(policy_id), self._policies.get(policy_id)
            if place is not None:
                return place
            if content is None:
                raise FleetError("Nobody holds these weights any more.")
            place = object_cache.put(f"{self._application}/shared", content)
            self._cluster.meter.sent(len(content))
            with self._lock:
                held = policy_id in self._policies
                if held:
                    self._places[policy_id] = place
            if not held:  # released meanwhile
                self._desk.throw_away(place.key)
                raise FleetError("Nobody holds these weights any more.")
            return place

    def _forget_place(self, policy_id: str, place: Reference | None) -> None:
        """They could not be had there; by now they may lie elsewhere."""
        with self._lock:
            if self._places.get(policy_id) != place:
                return
            self._places.pop(policy_id, None)
        if place is not None:  # the cache may only have been away
            self._desk.throw_away(place.key)

    # Tasks.

    def submit(self, tasks: Sequence[RolloutTask]) -> FlameSubmission:
        answers: queue.SimpleQueue[Fragment | RlflameError | None] = queue.SimpleQueue()
        jobs = [Job(task, wire.encode(task), b"", answers) for task in tasks]
        if self._failed is not None:
            raise self._failed
        with self._lock:
            unknown = [task.policy_id for task in tasks if task.policy_id not in self._policies]
            if unknown:
                raise KeyError(unknown[0])
            # Held until the submission is over: a release never pulls weights from under it.
            self._uses.update(task.policy_id for task in tasks)
        for task in tasks:
            self._observer(FleetEvent("submitted", task.purpose, task.slot))
        began = time.monotonic()

        def over(whole: bool) -> None:
            for task in tasks:
                self.release(task.policy_id)
            if whole and tasks and tasks[0].purpose == "train":
                self._overhead.round_over(time.monotonic() - began, len(tasks), self.capacity)
                if self._advises:
                    self._note_once("overhead", self._overhead.sentence())

        self._desk.add(jobs)
        return FlameSubmission(self._desk, jobs, answers, over)

    def traffic(self) -> Traffic:
        """Between this process and the cluster; an executor's fetching of weights is its own."""
        return self._cluster.meter.read()

    def probe(self) -> FleetReport:
        """Of the workers that have answered; executors come and go."""
        if threading.current_thread() is not self._thread:  # an observer asks while it is told
            self._session()
        workers = self._workers.seen()
        if not workers and self._started is not None:
            found = self._started.greeting
            workers = [{**found["packages"], **{k: found[k] for k in ("host", "python", "libc")}}]
        return FleetReport(self.name, self.capacity, tuple(workers))

    # What is told.

    def _note_once(self, topic: str, text: str) -> None:
        with self._lock:
            if not text or topic in self._said:
                return
            self._said.add(topic)
        self._note(text)

    def _note(self, text: str) -> None:
        self._observer(FleetEvent("note", "", 0, text))

    def _phase(self, text: str) -> None:
        self._observer(FleetEvent("phase", "", 0, text))

    def _stalled(self, waited_s: float) -> None:
        if self._started is not None:
            with contextlib.suppress(Unanswered):
                self._starter.stalled(self._started, waited_s)

    def _trouble(self, reason: str) -> RlflameError:
        """Why task after task fails: an executor whose process died fails all it is given."""
        for what, ask in (
            ("session manager", self._cluster.nodes),
            ("object cache", lambda: object_cache.put(f"{self._application}/shared", b"?")),
        ):
            try:
                ask()
            except FleetError as error:
                return Away(
                    f"The {what} does not answer any more: {error.message}",
                    "rlflame cluster-check, then rlflame resume",
                )
        seen = ""
        with contextlib.suppress(FleetError):
            ours = [
                f"{executor.spec.node} ({EXECUTOR_STATES[executor.status.state]})"
                for executor in self._cluster.executors()
                if self._started and executor.status.session_id == self._started.session_id
            ]
            seen = f" Executors of this run: {', '.join(sorted(ours)) or 'none'}."
        return FleetError(
            f"Task after task failed on the cluster, the last with: {reason}.{seen} A worker "
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
            self._lease.announce_end()
        self._desk.close()
        self._thread.join(timeout=5.0)
        cleaning = threading.Thread(target=self._clean, name="rlflame-clean", daemon=True)
        cleaning.start()
        # A cluster that does not answer must not hold the process.
        cleaning.join(timeout=_CLEAN_S)
        self._lease.end()
        if self._left:
            self._note(
                f"flame: {self._left}; rlflame cluster-check --clean removes what is left of this "
                "run"
            )
        self._cluster.close()

    def _clean(self) -> None:
        self._left = withdraw(
            self._cluster, self._application, self._starter.opened, _DRAIN_S, self._lease.end
        )
