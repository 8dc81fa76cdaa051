"""Runs attempts at jobs. Each attempt is one task on the cluster.

Every wait is bounded. If a task's watch (flamepy's stream of status updates) breaks or reports
nothing, the task is polled. Calls to a session manager that does not answer are retried for up to
`reconnect_s`.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import FleetError, RlflameError
from rlflame.fleet.base import FleetEvent, Observer, ignore_event
from rlflame.fleet.job_queue import FleetJob, JobQueue
from rlflame.rollout import wire

from . import object_cache
from .bundle import make_request
from .client import FAILED, FINAL_STATES, OPEN, RUNNING, SUCCEED, FlameClient, TaskStatus
from .object_cache import Reference
from .policy_store import PolicyStore
from .session_starter import SessionStarter
from .timed_call import format_error

T = TypeVar("T")
#: A larger input is sent through the cache: the session manager rejects messages over 4 MiB.
INLINE_BYTES = 3 << 20
_POLL_INTERVAL_S = 0.5
_ABANDONED_INTERVAL_S = 10.0


class ClusterUnreachableError(FleetError):
    """The session, the session manager or the cache is gone, so no task can run."""


class AttemptTimeout(FleetError):
    """An executor started a task, but did not answer within the deadline."""


@dataclass(eq=False)
class Attempt:
    """One task on the cluster, which runs one job or several short jobs."""

    jobs: list[FleetJob]
    created_at: float
    running_at: float | None = None
    #: The time at which the monitor last closed the watch, so that the task is polled.
    polled_at: float = 0.0
    #: The ID of the task on the cluster; empty until the task is created.
    task: str = ""
    #: The latest watch: flamepy's iterator over the status updates of the task.
    watch: Any = None
    #: The location of the weights when the task was sent.
    weights: Reference | None = None
    speculative: bool = False
    has_failed: bool = False

    @property
    def is_awaited(self) -> bool:
        """Whether any job still waits for an answer."""
        return not all(job.is_over for job in self.jobs)

    def close_watch(self) -> None:
        """Cancel the watch, so that its reader gets an error and polls instead."""
        stream = getattr(self.watch, "_stream", None)
        if stream is not None:
            stream.cancel()


class JobBoard:
    """The jobs and attempts of a fleet. Callers hold `lock` to read or change them."""

    def __init__(self, observer: Observer) -> None:
        self.lock = threading.Condition()
        self.jobs = JobQueue()
        self.attempts: list[Attempt] = []
        self.closing = threading.Event()
        self.final_error: RlflameError | None = None
        self._observer = observer
        # The lock is reentrant, because an observer may call the fleet and so cause further events.
        self._notify_lock = threading.RLock()

    def cancel(self, jobs: Sequence[FleetJob]) -> None:
        with self.lock:
            self.jobs.cancel(jobs)
        self.deliver()

    def fail_all(self, error: RlflameError) -> None:
        """End every job with this error, including jobs that are added later."""
        with self.lock:
            self.final_error = self.final_error or error
            running = [job for attempt in self.attempts for job in attempt.jobs]
            self.jobs.fail_all(self.final_error, running)
        self.deliver()

    def deliver(self, *events: FleetEvent) -> None:
        """Deliver outcomes and events without holding `lock`, one thread at a time."""
        with self._notify_lock:
            try:
                self.jobs.deliver_news(self.lock, self._observer)
                for event in events:
                    self._observer(event)
            except Exception as error:  # otherwise a consumer would wait forever
                self._observer = ignore_event
                message = f"An observer of the fleet failed: {error!r}."
                self.fail_all(FleetError(message, "", traceback.format_exc()))


@dataclass
class AttemptRunner:
    """Sends attempts to the cluster and waits for their answers."""

    client: FlameClient
    starter: SessionStarter
    policies: PolicyStore
    board: JobBoard
    runtime: RuntimeSettings
    #: Abandoned tasks, whose answers are no longer needed, each with the time of its next poll.
    leftover_tasks: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=1000))

    def run(self, attempt: Attempt) -> dict[str, Any]:
        """Run an attempt; return the worker's answers and its description of itself."""
        session, policy = self.starter.wait().session, attempt.jobs[0].task.policy_id
        delete = self.policies.deleter.delete
        weights = attempt.weights = self.policies.find_reference(policy)
        tasks = [np.frombuffer(job.payload, np.uint8) for job in attempt.jobs]
        content = wire.encode({"tasks": tasks})
        # The worker's flamepy formats all arguments for its log. Those of this type are cheap.
        payload: Any = io.BytesIO(content)
        large_input = None
        if len(content) > INLINE_BYTES:
            large_input = object_cache.put(f"{session.application}/shared", content)
            self.client.meter.count_sent(len(content))
            payload = large_input.as_argument()
        request = make_request("run", payload, policy, weights.endpoint, weights.key)
        try:
            attempt.task = self._call_persistently(self.client.create_task, session, request)
            attempt.created_at = time.monotonic()  # a task cannot stall before it exists
            status = self._wait_for_end(session, attempt)
        finally:
            if large_input is not None:
                delete(large_input.key)
        reference, answer = self.client.fetch_result(session, status)
        self.client.meter.count_received(answer.nbytes)
        delete(reference.key)
        reply: dict[str, Any] = wire.decode(answer)
        if len(reply["answers"]) != len(attempt.jobs):
            raise FleetError("its worker did not answer all of the tasks")
        return reply

    def _wait_for_end(self, session: Any, attempt: Attempt) -> TaskStatus:
        """Watch the task until it ends; poll the task whenever the watch breaks."""
        while True:
            with contextlib.suppress(Exception):  # a watch may break at any moment
                attempt.watch = session.watch_task(attempt.task)
                for update in attempt.watch:
                    status = TaskStatus(int(update.state), update.output)
                    self._handle_status(attempt, status)
                    if status.state == FAILED:
                        break  # only a poll returns the reason
                    if status.state in FINAL_STATES:
                        return status
            status = self._call_persistently(self.client.get_task_status, session, attempt.task)
            self._handle_status(attempt, status)
            if status.state in FINAL_STATES:
                return status
            late_s = time.monotonic() - (attempt.running_at or time.monotonic())
            is_late = late_s > self.runtime.flame.task_deadline_s
            if is_late or not attempt.is_awaited or self.board.closing.is_set():
                self.leftover_tasks.append((attempt.task, time.monotonic() + _ABANDONED_INTERVAL_S))
                if attempt.is_awaited and is_late:
                    raise AttemptTimeout(f"no answer within {late_s:.0f} s")
                raise FleetError("no job waits for it any more")
            time.sleep(_POLL_INTERVAL_S)

    def tidy(self) -> None:
        """Poll one abandoned task; if the task has finished, delete its answer."""
        if not self.leftover_tasks or self.leftover_tasks[0][1] > time.monotonic():
            return
        task, _ = self.leftover_tasks.popleft()
        with contextlib.suppress(Exception):  # remaining objects are deleted with the run
            session = self.starter.wait().session
            status = self.client.get_task_status(session, task)
            if status.state == SUCCEED and status.output is not None:
                reference = object_cache.parse_reference(status.output, session)
                self.policies.deleter.delete(reference.key)
            elif status.state not in FINAL_STATES:
                self.leftover_tasks.append((task, time.monotonic() + _ABANDONED_INTERVAL_S))

    def poll(self, attempt: Attempt) -> None:
        """Check whether the task is running. A watch that starts late misses changes."""
        with contextlib.suppress(Exception):
            session = self.starter.wait().session
            self._handle_status(attempt, self.client.get_task_status(session, attempt.task))

    def _handle_status(self, attempt: Attempt, status: TaskStatus) -> None:
        # A short task may end before any status says that it is running.
        if status.state in (RUNNING, SUCCEED) and attempt.running_at is None:
            attempt.running_at = time.monotonic()
            with self.board.lock:
                for job in attempt.jobs:
                    self.board.jobs.mark_running(job)
            self.board.deliver()

    def _call_persistently(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call, and retry it while the session manager does not answer."""
        deadline, pause_s = time.monotonic() + self.runtime.flame.reconnect_s, 0.1
        closed_count = 0
        while True:
            try:
                return call(*arguments)
            except Exception as error:
                # A restarted session manager may not know all sessions yet, so ask twice.
                closed_count = closed_count + 1 if pause_s > 1.0 and self._is_session_over() else 0
                if closed_count > 1 and not self.board.closing.is_set():
                    raise ClusterUnreachableError(
                        "This run's session is closed or no longer known to the cluster.",
                        "rlflame resume opens a new one",
                    ) from error
                if time.monotonic() > deadline or self.board.closing.is_set():
                    raise ClusterUnreachableError(
                        "The session manager has not answered for "
                        f"{self.runtime.flame.reconnect_s:g} s: {format_error(error)}.",
                        "rlflame cluster-check, then rlflame resume",
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2.0, 2.0 * pause_s)

    def _is_session_over(self) -> bool:
        """Return whether the session manager no longer lists the run's session as open."""
        try:
            sessions = self.client.call("list_sessions")
        except FleetError:
            return False
        session_id = self.starter.wait().session.id
        return not any(s.id == session_id and s.state == OPEN for s in sessions)
