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
from rlflame.fleet.flame.check.findings import Pace
from rlflame.fleet.flame.check.run_removal import withdraw
from rlflame.fleet.flame.client import CANCELLED, FAILED, SUCCEED, Cluster, TaskNews, close_quietly
from rlflame.fleet.flame.lease import Lease
from rlflame.fleet.flame.requests import parse_greeting, request
from rlflame.fleet.flame.session_start import PREFIX, Starter, Wishes
from rlflame.fleet.flame.timeouts import CALL_S, Unanswered, bounded

_LEASE_S = 10.0
_PINGS = 20
_ASK_EVERY_S = 0.05
#: A task lasts at least so long, so that each executor that is up takes one.
_WAIT_S = 0.4
_DELAY_RELEASE_S = 30
_ENDED = (SUCCEED, FAILED, CANCELLED)
#: Void, Idle and Binding, as they are numbered on the wire.
_COMING = (1, 2, 3)


@dataclass(frozen=True)
class Greeting:
    """What an executor said, and when it was asked and had answered by this machine's clock."""

    said: dict[str, Any]
    asked_at: float
    answered_at: float

    @property
    def executor(self) -> tuple[Any, ...]:
        """Which one it was: a worker process."""
        return (self.said["host"], self.said["pid"], self.said["folder"])

    @property
    def skew_s(self) -> float:
        """How far its clock is off at the least; it said its time between question and answer."""
        clock = float(self.said["clock"])
        return max(0.0, clock - self.answered_at) or min(0.0, clock - self.asked_at)


@dataclass
class Answers:
    """What came of asking."""

    wanted: int
    cold_start_s: float | None = None
    greetings: list[Greeting] = field(default_factory=list)
    round_trips_s: list[float] = field(default_factory=list)
    #: What went wrong, and what the error said to do about it.
    problem: str = ""
    hint: str = ""
    #: Nobody answered the very first question in time.
    silence: bool = False
    #: The caches that results lay in.
    caches: set[str] = field(default_factory=set)
    #: What could not be removed afterwards.
    left: str = ""
    application: str = ""


@dataclass
class Probe:
    """Asks as many executors as are wanted and come."""

    cluster: Cluster
    pace: Pace
    tell: Callable[[str], None]
    #: Called, with the session still open, when nobody answers: what the cluster looks like then.
    witness: Callable[[], None]
    _caches: set[str] = field(default_factory=set)

    def ask(self, wanted: int) -> Answers:
        answers = Answers(
            wanted, caches=self._caches, application=f"{PREFIX}check-{uuid.uuid4().hex[:12]}"
        )
        with self._complaints(answers), self._application(answers) as starter:
            asked_at = time.time()
            began = self.pace.clock()
            try:
                started = starter.ask_prepared()
            except FleetError:
                answers.silence = True
                self.witness()
                raise
            answers.cold_start_s = self.pace.clock() - began
            answers.greetings.append(Greeting(started.greeting, asked_at, time.time()))
            self._everyone(started.session, started.session_id, answers)
            for _ in range(_PINGS):
                answers.round_trips_s.append(self._ping(started.session))
        return answers

    @contextlib.contextmanager
    def _complaints(self, answers: Answers) -> Iterator[None]:
        try:
            yield
        except FleetError as error:
            answers.problem, answers.hint = error.message, error.hint

    @contextlib.contextmanager
    def _application(self, answers: Answers) -> Iterator[Starter]:
        """One with a lease, so that a check-up that is killed can be told from one that lives."""
        cluster, name = self.cluster, answers.application
        kept = bounded(lambda: Lease(cluster.cache_endpoint, name), _LEASE_S, "lease")
        wishes = Wishes(
            most=answers.wanted,
            dependencies="prepared",
            start_deadline_s=self.pace.first_answer_s,
            delay_release_s=_DELAY_RELEASE_S,
        )
        starter = Starter(
            cluster, name, {}, wishes, self.tell, lambda: False, clock=self.pace.clock
        )
        try:
            yield starter
        finally:
            with contextlib.suppress(FleetError):
                bounded(kept.announce_end, _LEASE_S, "lease")
            sessions = [session_id for _, session_id in starter.opened]
            try:
                answers.left = withdraw(cluster, sessions, [name], self.pace)
            except FleetError as error:
                answers.left = error.message
            kept.end()
            if not answers.left:
                with contextlib.suppress(FleetError):
                    object_cache.delete(f"{name}/*")

    def _everyone(self, session: Any, session_id: str, answers: Answers) -> None:
        """Ask in rounds until every executor that comes has answered once."""
        met = {greeting.executor for greeting in answers.greetings}
        end_s = self.pace.clock() + self.pace.all_answers_s
        while len(met) < answers.wanted and self.pace.clock() < end_s:
            news = [
                greeting
                for greeting in self._round(session, answers.wanted)
                if greeting.executor not in met
            ]
            for greeting in news:
                if greeting.executor not in met:
                    met.add(greeting.executor)
                    answers.greetings.append(greeting)
            if not news and not self._more_come(session_id, len(met)):
                break

    def _more_come(self, session_id: str, met: int) -> bool:
        ours = [e for e in self.cluster.executors() if e.status.session_id == session_id]
        return len(ours) > met or any(executor.status.state in _COMING for executor in ours)

    def _round(self, session: Any, number: int) -> list[Greeting]:
        greetings, open_tasks = [], {}
        for _ in range(number):
            asked_at = time.time()
            task = self._create(session, request("greet", _WAIT_S))
            open_tasks[task] = asked_at
        end_s = self.pace.clock() + self.pace.all_answers_s
        while open_tasks:
            if self.pace.clock() > end_s:
                raise Unanswered(
                    f"{len(open_tasks)} of {number} small tasks were not answered within "
                    f"{self.pace.all_answers_s:g} s."
                )
            for task, asked_at in list(open_tasks.items()):
                news = bounded(partial(self.cluster.ask, session, task), CALL_S, "get task")
                if news.state in _ENDED:
                    del open_tasks[task]
                    said = parse_greeting(self._result(session, news))
                    greetings.append(Greeting(said, asked_at, time.time()))
            self.pace.pause(_ASK_EVERY_S)
        return greetings

    def _ping(self, session: Any) -> float:
        began = time.perf_counter()
        task = self._create(session, request("ping"))
        streams: list[Any] = []
        try:
            news = bounded(lambda: self._watched(session, task, streams), CALL_S, "small task")
        finally:
            for stream in streams:
                close_quietly(stream)
        took_s = time.perf_counter() - began
        self._result(session, news)
        return took_s

    def _create(self, session: Any, payload: bytes) -> str:
        return bounded(lambda: self.cluster.create(session, payload), CALL_S, "create task")

    def _watched(self, session: Any, task: str, streams: list[Any]) -> TaskNews:
        """How the task ended, as soon as it has; a watch that ends early is asked after."""
        with contextlib.suppress(Exception):
            for news in self.cluster.watch(session, task, streams.append):
                if news.state in _ENDED:
                    return self.cluster.ask(session, task) if news.state == FAILED else news
        end_s = self.pace.clock() + CALL_S
        while self.pace.clock() < end_s:
            news = self.cluster.ask(session, task)
            if news.state in _ENDED:
                return news
            self.pace.pause(_ASK_EVERY_S)
        raise Unanswered(f"A small task did not end within {CALL_S:g} s.")

    def _result(self, session: Any, news: TaskNews) -> memoryview:
        if news.state != SUCCEED or news.output is None:
            raise FleetError(
                f"A small task failed ({news.message or 'no reason given'}).",
                "the executor's log is under FLAME_HOME; rlflame cluster-check again",
            )
        try:
            place = object_cache.place(news.output, session)
            self._caches.add(place.endpoint)
            return object_cache.get(place.key)
        except KeyError as error:
            raise FleetError(
                "The object cache lost a small task's result.", "give it cache.storage"
            ) from error
