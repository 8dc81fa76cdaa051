"""One attempt at a job or a few, as one task of the cluster, from its creation to the answers.

Nothing here waits for ever: where a watch falls silent the task is asked for, and a session
manager that is away is waited for within bounds. Must not know: queues, retries, other attempts.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rlflame.errors import FleetError
from rlflame.fleet.jobs import FleetJob
from rlflame.rollout import wire

from . import object_cache
from .client import CANCELLED, CLOSED, FAILED, RUNNING, SUCCEED, FlameClient, TaskStatus
from .object_cache import Reference, make_reference_argument
from .requests import make_request
from .timed_call import format_error

T = TypeVar("T")
#: An input larger than this travels through the cache; the session manager refuses 4 MiB.
INLINE_BYTES = 3 << 20
_POLL_INTERVAL_S = 0.5
_ABANDONED_INTERVAL_S = 10.0


class ClusterUnreachableError(FleetError):
    """The session manager or the cache did not come back in time: no attempt can be made."""


class AttemptTimeout(FleetError):
    """An executor has the task, and has not answered within the deadline."""


@dataclass(eq=False)
class Attempt:
    """One task on the cluster, made for one job or for several short ones."""

    jobs: list[FleetJob]
    created_at: float
    running_at: float | None = None
    #: When the monitor last had it asked for.
    polled_at: float = 0.0
    #: What the cluster calls it, once it is there.
    task: str = ""
    stream: Any = None
    #: Where its weights lay when it was sent.
    weights: Reference | None = None
    speculative: bool = False
    #: It came to nothing, and somebody has to decide what follows.
    has_failed: bool = False

    @property
    def is_awaited(self) -> bool:
        """Whether anybody still waits for an answer."""
        return not all(job.ended for job in self.jobs)


@dataclass
class AttemptRunner:
    """How attempts of one fleet are carried through."""

    client: FlameClient
    get_session: Callable[[], Any]
    find_weights: Callable[[str], Reference]
    delete_object: Callable[[str], None]
    #: Told once of each attempt, when an executor has it.
    on_running: Callable[[Attempt], None]
    is_closing: Callable[[], bool]
    task_deadline_s: float
    reconnect_s: float
    clock: Callable[[], float] = time.monotonic
    #: Tasks that go on although nobody waits for them, and when each is asked for again.
    _abandoned: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=1000))

    def run(self, attempt: Attempt) -> dict[str, Any]:
        """The worker and its answers; raises where the cluster failed the attempt."""
        session, policy = self.get_session(), attempt.jobs[0].task.policy_id
        reference = attempt.weights = self.find_weights(policy)
        content = wire.encode({"tasks": [_view_bytes(job.payload) for job in attempt.jobs]})
        payload: Any = _view_bytes(content)
        large_input = None
        if len(content) > INLINE_BYTES:
            large_input = object_cache.put(f"{session.application}/shared", content)
            self.client.meter.count_sent(len(content))
            payload = make_reference_argument(large_input)
        payload_bytes = make_request("run", payload, policy, reference.endpoint, reference.key)
        try:
            attempt.task = self._call_persistently(
                lambda: self.client.create_task(session, payload_bytes)
            )
            attempt.created_at = self.clock()  # until then it could not stand still
            status = self._wait_for_end(session, attempt)
        finally:
            if large_input is not None:
                self.delete_object(large_input.key)
        if status.state != SUCCEED or status.output is None:
            raise FleetError(status.message or "its executor failed without a word")
        reference = object_cache.parse_reference(status.output, session)
        try:
            answer_bytes = object_cache.get(reference.key)
        except KeyError as error:
            raise FleetError("its answer was gone from the cache") from error
        self.client.meter.count_received(answer_bytes.nbytes)
        self.delete_object(reference.key)
        reply: dict[str, Any] = wire.decode(answer_bytes)
        if len(reply["answers"]) != len(attempt.jobs):
            raise FleetError("its worker did not answer all that it was asked")
        return reply

    def _wait_for_end(self, session: Any, attempt: Attempt) -> TaskStatus:
        """The task's end: watched for, and asked for wherever the watch falls silent."""

        def store_stream(stream: Any) -> None:
            attempt.stream = stream

        while True:
            with contextlib.suppress(Exception):  # a watch may break at any moment
                for status in self.client.watch_task(session, attempt.task, store_stream):
                    self._handle_status(attempt, status)
                    if status.state in (SUCCEED, CANCELLED):
                        return status
                    if status.state == FAILED:
                        break  # why, is only told to those who ask
            status = self._call_persistently(
                lambda: self.client.get_task_status(session, attempt.task)
            )
            self._handle_status(attempt, status)
            if status.state in (SUCCEED, FAILED, CANCELLED):
                return status
            if not attempt.is_awaited or self.is_closing():
                self._abandon(attempt)
                return TaskStatus(CANCELLED, None, "nobody waits for it any more")
            late_s = self.clock() - (attempt.running_at or self.clock())
            if late_s > self.task_deadline_s:
                self._abandon(attempt)
                raise AttemptTimeout(f"no answer within {late_s:.0f} s")
            time.sleep(_POLL_INTERVAL_S)

    def _abandon(self, attempt: Attempt) -> None:
        self._abandoned.append((attempt.task, self.clock() + _ABANDONED_INTERVAL_S))

    def tidy(self) -> None:
        """Delete the answer of a task that nobody waits for, once there is one."""
        if not self._abandoned or self._abandoned[0][1] > self.clock():
            return
        task, _ = self._abandoned.popleft()
        with contextlib.suppress(Exception):  # what stays is deleted with the run
            session = self.get_session()
            status = self.client.get_task_status(session, task)
            if status.state == SUCCEED and status.output is not None:
                self.delete_object(object_cache.parse_reference(status.output, session).key)
            elif status.state not in (SUCCEED, FAILED, CANCELLED):
                self._abandoned.append((task, self.clock() + _ABANDONED_INTERVAL_S))

    def poll(self, attempt: Attempt) -> None:
        """Ask whether it runs: a watch that is opened late is not told of what was before it."""
        if attempt.task:
            with contextlib.suppress(Exception):
                self._handle_status(
                    attempt, self.client.get_task_status(self.get_session(), attempt.task)
                )

    def _handle_status(self, attempt: Attempt, status: TaskStatus) -> None:
        # A short task may have come to its end before anybody saw it run.
        if status.state in (RUNNING, SUCCEED) and attempt.running_at is None:
            attempt.running_at = self.clock()
            self.on_running(attempt)

    def _call_persistently(self, call: Callable[[], T]) -> T:
        """The call's result, tried again while the session manager is away."""
        deadline, pause_s = self.clock() + self.reconnect_s, 0.1
        closed_count = 0
        while True:
            try:
                return call()
            except Exception as error:
                # One that has just come back may not know everything yet: it is asked twice.
                closed_count = closed_count + 1 if pause_s > 1.0 and self._is_session_over() else 0
                if closed_count > 1 and not self.is_closing():
                    raise ClusterUnreachableError(
                        "The cluster knows this run's session no more, or as closed.",
                        "rlflame resume opens another",
                    ) from error
                if self.clock() > deadline or self.is_closing():
                    raise ClusterUnreachableError(
                        f"The session manager has been away for {self.reconnect_s:g} s: "
                        f"{format_error(error)}.",
                        "rlflame cluster-check, then rlflame resume",
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2.0, 2.0 * pause_s)

    def _is_session_over(self) -> bool:
        """Whether the session manager is there, and it is the session that is not."""
        try:
            states = {session.id: int(session.state) for session in self.client.list_sessions()}
        except FleetError:
            return False
        return states.get(self.get_session().id, CLOSED) == CLOSED


def _view_bytes(content: bytes) -> Any:
    return np.frombuffer(content, np.uint8)
