"""One attempt at a job or a few, as one task of the cluster, from its creation to the answers.

Nothing here waits for ever: where a watch falls silent the task is asked for, and a session
manager that is away is waited for within bounds. Must not know: queues, retries, other attempts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rlflame.errors import FleetError
from rlflame.fleet.jobs import Job
from rlflame.rollout import wire

from . import objects
from .bounded import said
from .cluster import CANCELLED, FAILED, RUNNING, SUCCEED, Cluster, TaskNews
from .objects import Reference
from .parcel import reference_argument, request

T = TypeVar("T")
#: An input larger than this travels through the cache; the session manager refuses 4 MiB.
INLINE_BYTES = 3 << 20
_ASK_EVERY_S = 0.5


class Away(FleetError):
    """The session manager did not come back in time: no attempt can be made any more."""


@dataclass(eq=False)
class Attempt:
    """One task on the cluster, made for one job or for several short ones."""

    jobs: list[Job]
    created_at: float
    running_at: float | None = None
    #: When the monitor last had it asked for.
    asked_at: float = 0.0
    task: str = ""
    stream: Any = None
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

    def carry(self, attempt: Attempt) -> dict[str, Any]:
        """The worker and its answers; raises where the cluster failed the attempt."""
        session, policy = self.session(), attempt.jobs[0].task.policy_id
        place = self.weights(policy)
        content = wire.encode({"tasks": [_bytes(job.payload) for job in attempt.jobs]})
        payload: Any = _bytes(content)
        large = None
        if len(content) > INLINE_BYTES:
            large = objects.put(f"{session.application}/shared", content)
            self.cluster.meter.sent(len(content))
            payload = reference_argument(large)
        call = request("run", payload, policy, place.endpoint, place.key)
        try:
            attempt.task = self._persist(lambda: self.cluster.create(session, call))
            news = self._outcome(session, attempt)
        finally:
            if large is not None:
                self.throw_away(large.key)
        if news.state != SUCCEED or news.output is None:
            raise FleetError(news.message or "its executor failed without a word")
        place = objects.place(news.output)
        found = memoryview(objects.get(place))
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
            overdue = self._overdue(attempt)
            if overdue:
                return TaskNews(CANCELLED, None, overdue)
            if not attempt.wanted or self.closing():
                return TaskNews(CANCELLED, None, "nobody waits for it any more")
            time.sleep(_ASK_EVERY_S)

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

    def _overdue(self, attempt: Attempt) -> str:
        if attempt.running_at is None:
            return ""
        for_s = self.clock() - attempt.running_at
        return f"no answer within {for_s:.0f} s" if for_s > self.task_deadline_s else ""

    def _persist(self, call: Callable[[], T]) -> T:
        """The call's result, tried again while the session manager is away."""
        deadline, pause = self.clock() + self.reconnect_s, 0.1
        while True:
            try:
                return call()
            except Exception as error:
                if self.clock() > deadline or self.closing():
                    raise Away(
                        f"The session manager has been away for {self.reconnect_s:g} s: "
                        f"{said(error)}.",
                        "rlflame cluster-check, then rlflame resume",
                    ) from error
            time.sleep(pause)
            pause = min(2.0, 2.0 * pause)


def _bytes(content: bytes) -> Any:
    return np.frombuffer(content, np.uint8)
