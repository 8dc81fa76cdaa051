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
from rlflame.fleet.jobs import Job
from rlflame.rollout import wire

from . import object_cache
from .client import CANCELLED, CLOSED, FAILED, RUNNING, SUCCEED, Cluster, TaskNews
from .object_cache import Reference, reference_argument
from .requests import request
from .timeouts import said

T = TypeVar("T")
#: An input larger than this travels through the cache; the session manager refuses 4 MiB.
INLINE_BYTES = 3 << 20
_ASK_EVERY_S = 0.5
_ABANDONED_EVERY_S = 10.0


class Away(FleetError):
    """The session manager or the cache did not come back in time: no attempt can be made."""


class Overdue(FleetError):
    """An executor has the task, and has not answered within the deadline."""


@dataclass(eq=False)
class Attempt:
    """One task on the cluster, made for one job or for several short ones."""

    jobs: list[Job]
    created_at: float
    running_at: float | None = None
    #: When the monitor last had it asked for.
    asked_at: float = 0.0
    #: What the cluster calls it, once it is there.
    task: str = ""
    stream: Any = None
    #: Where its weights lay when it was sent.
    weights: Reference | None = None
    speculative: bool = False
    #: It came to nothing, and somebody has to decide what follows.
    over: bool = False

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for an answer."""
        return not all(job.ended for job in self.jobs)


@dataclass
class Errands:
    """How attempts of one fleet are carried through."""

    cluster: Cluster
    session: Callable[[], Any]
    weights: Callable[[str], Reference]
    throw_away: Callable[[str], None]
    #: Told once of each attempt, when an executor has it.
    runs: Callable[[Attempt], None]
    closing: Callable[[], bool]
    task_deadline_s: float
    reconnect_s: float
    clock: Callable[[], float] = time.monotonic
    #: Tasks that go on although nobody waits for them, and when each is asked for again.
    _abandoned: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=1000))

    def carry(self, attempt: Attempt) -> dict[str, Any]:
        """The worker and its answers; raises where the cluster failed the attempt."""
        session, policy = self.session(), attempt.jobs[0].task.policy_id
        place = attempt.weights = self.weights(policy)
        content = wire.encode({"tasks": [_bytes(job.payload) for job in attempt.jobs]})
        payload: Any = _bytes(content)
        large = None
        if len(content) > INLINE_BYTES:
            large = object_cache.put(f"{session.application}/shared", content)
            self.cluster.meter.sent(len(content))
            payload = reference_argument(large)
        call = request("run", payload, policy, place.endpoint, place.key)
        try:
            attempt.task = self._persist(lambda: self.cluster.create(session, call))
            attempt.created_at = self.clock()  # until then it could not stand still
            news = self._outcome(session, attempt)
        finally:
            if large is not None:
                self.throw_away(large.key)
        if news.state != SUCCEED or news.output is None:
            raise FleetError(news.message or "its executor failed without a word")
        place = object_cache.place(news.output, session)
        try:
            found = object_cache.get(place.key)
        except KeyError as error:
            raise FleetError("its answer was gone from the cache") from error
        self.cluster.meter.received(found.nbytes)
        self.throw_away(place.key)
        answered: dict[str, Any] = wire.decode(found)
        if len(answered["answers"]) != len(attempt.jobs):
            raise FleetError("its worker did not answer all that it was asked")
        return answered

    def _outcome(self, session: Any, attempt: Attempt) -> TaskNews:
        """The task's end: watched for, and asked for wherever the watch falls silent."""

        def opened(stream: Any) -> None:
            attempt.stream = stream

        while True:
            with contextlib.suppress(Exception):  # a watch may break at any moment
                for news in self.cluster.watch(session, attempt.task, opened):
                    self._noticed(attempt, news)
                    if news.state in (SUCCEED, CANCELLED):
                        return news
                    if news.state == FAILED:
                        break  # why, is only told to those who ask
            news = self._persist(lambda: self.cluster.ask(session, attempt.task))
            self._noticed(attempt, news)
            if news.state in (SUCCEED, FAILED, CANCELLED):
                return news
            if not attempt.wanted or self.closing():
                self._abandon(attempt)
                return TaskNews(CANCELLED, None, "nobody waits for it any more")
            late_s = self.clock() - (attempt.running_at or self.clock())
            if late_s > self.task_deadline_s:
                self._abandon(attempt)
                raise Overdue(f"no answer within {late_s:.0f} s")
            time.sleep(_ASK_EVERY_S)

    def _abandon(self, attempt: Attempt) -> None:
        self._abandoned.append((attempt.task, self.clock() + _ABANDONED_EVERY_S))

    def tidy(self) -> None:
        """Delete the answer of a task that nobody waits for, once there is one."""
        if not self._abandoned or self._abandoned[0][1] > self.clock():
            return
        task, _ = self._abandoned.popleft()
        with contextlib.suppress(Exception):  # what stays is deleted with the run
            session = self.session()
            news = self.cluster.ask(session, task)
            if news.state == SUCCEED and news.output is not None:
                self.throw_away(object_cache.place(news.output, session).key)
            elif news.state not in (SUCCEED, FAILED, CANCELLED):
                self._abandoned.append((task, self.clock() + _ABANDONED_EVERY_S))

    def look(self, attempt: Attempt) -> None:
        """Ask whether it runs: a watch that is opened late is not told of what was before it."""
        if attempt.task:
            with contextlib.suppress(Exception):
                self._noticed(attempt, self.cluster.ask(self.session(), attempt.task))

    def _noticed(self, attempt: Attempt, news: TaskNews) -> None:
        # A short task may have come to its end before anybody saw it run.
        if news.state in (RUNNING, SUCCEED) and attempt.running_at is None:
            attempt.running_at = self.clock()
            self.runs(attempt)

    def _persist(self, call: Callable[[], T]) -> T:
        """The call's result, tried again while the session manager is away."""
        deadline, pause = self.clock() + self.reconnect_s, 0.1
        closed = 0
        while True:
            try:
                return call()
            except Exception as error:
                # One that has just come back may not know everything yet: it is asked twice.
                closed = closed + 1 if pause > 1.0 and self._session_is_over() else 0
                if closed > 1 and not self.closing():
                    raise Away(
                        "The cluster knows this run's session no more, or as closed.",
                        "rlflame resume opens another",
                    ) from error
                if self.clock() > deadline or self.closing():
                    raise Away(
                        f"The session manager has been away for {self.reconnect_s:g} s: "
                        f"{said(error)}.",
                        "rlflame cluster-check, then rlflame resume",
                    ) from error
            time.sleep(pause)
            pause = min(2.0, 2.0 * pause)

    def _session_is_over(self) -> bool:
        """Whether the session manager is there, and it is the session that is not."""
        try:
            states = {session.id: int(session.state) for session in self.cluster.sessions()}
        except FleetError:
            return False
        return states.get(self.session().id, CLOSED) == CLOSED


def _bytes(content: bytes) -> Any:
    return np.frombuffer(content, np.uint8)
