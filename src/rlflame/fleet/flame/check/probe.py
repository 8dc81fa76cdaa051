"""Executors asked what they are: a session of its own, a few small tasks, and nothing left behind.

Must not know: what is good or bad about the answers.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlflame.errors import FleetError
from rlflame.fleet.flame import object_cache
from rlflame.fleet.flame.check.findings import CheckTimeouts
from rlflame.fleet.flame.check.run_removal import close_and_unregister
from rlflame.fleet.flame.client import (
    CANCELLED,
    FAILED,
    SUCCEED,
    FlameClient,
    TaskStatus,
    close_quietly,
)
from rlflame.fleet.flame.lease import Lease
from rlflame.fleet.flame.requests import make_request, parse_greeting
from rlflame.fleet.flame.session_start import PREFIX, FlameOptions, SessionStarter
from rlflame.fleet.flame.timed_call import CALL_S, ClusterCallError, call_with_timeout

_LEASE_S = 10.0
_PING_COUNT = 20
_POLL_INTERVAL_S = 0.05
#: A task lasts at least so long, so that each executor that is up takes one.
_WAIT_S = 0.4
_DELAY_RELEASE_S = 30
_FINAL_STATES = (SUCCEED, FAILED, CANCELLED)
#: Void, Idle and Binding, as they are numbered on the wire.
_STARTING_STATES = (1, 2, 3)


@dataclass(frozen=True)
class ExecutorReport:
    """What an executor said, and when it was asked and had answered by this machine's clock."""

    greeting: dict[str, Any]
    sent_at: float
    answered_at: float

    @property
    def executor(self) -> tuple[Any, ...]:
        """Which one it was: a worker process."""
        return (self.greeting["host"], self.greeting["pid"], self.greeting["folder"])

    @property
    def skew_s(self) -> float:
        """How far its clock is off at the least; it said its time between question and answer."""
        clock = float(self.greeting["clock"])
        return max(0.0, clock - self.answered_at) or min(0.0, clock - self.sent_at)


@dataclass
class ProbeResult:
    """What came of asking."""

    target: int
    cold_start_s: float | None = None
    reports: list[ExecutorReport] = field(default_factory=list)
    round_trips_s: list[float] = field(default_factory=list)
    #: What went wrong, and what the error said to do about it.
    problem: str = ""
    hint: str = ""
    #: Nobody answered the very first question in time.
    is_silent: bool = False
    #: The caches that results lay in.
    caches: set[str] = field(default_factory=set)
    #: What could not be removed afterwards.
    cleanup_problem: str = ""
    application: str = ""


@dataclass
class Probe:
    """Asks as many executors as are wanted and come."""

    client: FlameClient
    timeouts: CheckTimeouts
    report_progress: Callable[[str], None]
    #: Called, with the session still open, when nobody answers: what the cluster looks like then.
    on_silence: Callable[[], None]
    _caches: set[str] = field(default_factory=set)

    def run(self, target: int) -> ProbeResult:
        result = ProbeResult(
            target, caches=self._caches, application=f"{PREFIX}check-{uuid.uuid4().hex[:12]}"
        )
        with self._store_errors(result), self._open_application(result) as starter:
            sent_at = time.time()
            started_at = self.timeouts.clock()
            try:
                started = starter.ask_prepared()
            except FleetError:
                result.is_silent = True
                self.on_silence()
                raise
            result.cold_start_s = self.timeouts.clock() - started_at
            result.reports.append(ExecutorReport(started.greeting, sent_at, time.time()))
            self._ask_executors(started.session, started.session_id, result)
            for _ in range(_PING_COUNT):
                result.round_trips_s.append(self._ping(started.session))
        return result

    @contextlib.contextmanager
    def _store_errors(self, result: ProbeResult) -> Iterator[None]:
        try:
            yield
        except FleetError as error:
            result.problem, result.hint = error.message, error.hint

    @contextlib.contextmanager
    def _open_application(self, result: ProbeResult) -> Iterator[SessionStarter]:
        """One with a lease, so that a check-up that is killed can be told from one that lives."""
        client, name = self.client, result.application
        lease = call_with_timeout(lambda: Lease(client.cache_endpoint, name), _LEASE_S, "lease")
        options = FlameOptions(
            max_executors=result.target,
            dependencies="prepared",
            start_deadline_s=self.timeouts.first_answer_s,
            delay_release_s=_DELAY_RELEASE_S,
        )
        starter = SessionStarter(
            client,
            name,
            {},
            options,
            self.report_progress,
            lambda: False,
            clock=self.timeouts.clock,
        )
        try:
            yield starter
        finally:
            with contextlib.suppress(FleetError):
                call_with_timeout(lease.announce_closing, _LEASE_S, "lease")
            sessions = [session_id for _, session_id in starter.opened]
            try:
                result.cleanup_problem = close_and_unregister(
                    client, sessions, [name], self.timeouts
                )
            except FleetError as error:
                result.cleanup_problem = error.message
            lease.close()
            if not result.cleanup_problem:
                with contextlib.suppress(FleetError):
                    object_cache.delete(f"{name}/*")

    def _ask_executors(self, session: Any, session_id: str, result: ProbeResult) -> None:
        """Ask in rounds until every executor that comes has answered once."""
        known_executors = {report.executor for report in result.reports}
        deadline_s = self.timeouts.clock() + self.timeouts.all_answers_s
        while len(known_executors) < result.target and self.timeouts.clock() < deadline_s:
            new_reports = [
                report
                for report in self._run_round(session, result.target)
                if report.executor not in known_executors
            ]
            for report in new_reports:
                if report.executor not in known_executors:
                    known_executors.add(report.executor)
                    result.reports.append(report)
            if not new_reports and not self._has_more_executors(session_id, len(known_executors)):
                break

    def _has_more_executors(self, session_id: str, known_count: int) -> bool:
        executors = [e for e in self.client.list_executors() if e.status.session_id == session_id]
        return len(executors) > known_count or any(
            executor.status.state in _STARTING_STATES for executor in executors
        )

    def _run_round(self, session: Any, number: int) -> list[ExecutorReport]:
        reports, open_tasks = [], {}
        for _ in range(number):
            sent_at = time.time()
            task = self._create_task(session, make_request("greet", _WAIT_S))
            open_tasks[task] = sent_at
        deadline_s = self.timeouts.clock() + self.timeouts.all_answers_s
        while open_tasks:
            if self.timeouts.clock() > deadline_s:
                raise ClusterCallError(
                    f"{len(open_tasks)} of {number} small tasks were not answered within "
                    f"{self.timeouts.all_answers_s:g} s."
                )
            for task, sent_at in list(open_tasks.items()):
                status = call_with_timeout(
                    partial(self.client.get_task_status, session, task), CALL_S, "get task"
                )
                if status.state in _FINAL_STATES:
                    del open_tasks[task]
                    greeting = parse_greeting(self._read_result(session, status))
                    reports.append(ExecutorReport(greeting, sent_at, time.time()))
            self.timeouts.sleep(_POLL_INTERVAL_S)
        return reports

    def _ping(self, session: Any) -> float:
        started_at = time.perf_counter()
        task = self._create_task(session, make_request("ping"))
        streams: list[Any] = []
        try:
            status = call_with_timeout(
                lambda: self._wait_for_end(session, task, streams), CALL_S, "small task"
            )
        finally:
            for stream in streams:
                close_quietly(stream)
        took_s = time.perf_counter() - started_at
        self._read_result(session, status)
        return took_s

    def _create_task(self, session: Any, payload: bytes) -> str:
        return call_with_timeout(
            lambda: self.client.create_task(session, payload), CALL_S, "create task"
        )

    def _wait_for_end(self, session: Any, task: str, streams: list[Any]) -> TaskStatus:
        """How the task ended, as soon as it has; a watch that ends early is asked after."""
        with contextlib.suppress(Exception):
            for status in self.client.watch_task(session, task, streams.append):
                if status.state in _FINAL_STATES:
                    return (
                        self.client.get_task_status(session, task)
                        if status.state == FAILED
                        else status
                    )
        deadline_s = self.timeouts.clock() + CALL_S
        while self.timeouts.clock() < deadline_s:
            status = self.client.get_task_status(session, task)
            if status.state in _FINAL_STATES:
                return status
            self.timeouts.sleep(_POLL_INTERVAL_S)
        raise ClusterCallError(f"A small task did not end within {CALL_S:g} s.")

    def _read_result(self, session: Any, status: TaskStatus) -> memoryview:
        if status.state != SUCCEED or status.output is None:
            raise FleetError(
                f"A small task failed ({status.message or 'no reason given'}).",
                "the executor's log is under FLAME_HOME; rlflame cluster-check again",
            )
        try:
            reference = object_cache.parse_reference(status.output, session)
            self._caches.add(reference.endpoint)
            return object_cache.get(reference.key)
        except KeyError as error:
            raise FleetError(
                "The object cache lost a small task's result.", "give it cache.storage"
            ) from error
