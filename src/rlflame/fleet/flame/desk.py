"""Sees every task on a cluster to its one end: create, watch, ask, fetch, and try again.

One thread attends one attempt from its creation to its answer, so that each attempt reads from
top to bottom; a monitor looks for attempts that stand still. Nothing here waits for ever: where a
watch is silent the task is asked for, and where an attempt is lost another one is made, which by
design comes to the same fragment. Must not know: how applications start, what is displayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import numpy as np

from rlflame.errors import FleetError, RlflameError
from rlflame.fleet import FleetEvent, Observer, checked, environment_failure
from rlflame.fleet.jobs import Job, JobQueue, broken, died, hung
from rlflame.rollout import wire
from rlflame.rollout.spec import Fragment, RolloutFailure

from .cluster import (
    CANCELLED,
    FAILED,
    RUNNING,
    SUCCEED,
    Cluster,
    Reference,
    TaskNews,
    close_quietly,
    request,
    said,
)

T = TypeVar("T")
#: An input larger than this travels through the cache; the session manager refuses 4 MiB.
INLINE_BYTES = 3 << 20
#: Failures without a single answer between them, over such a time, that end the run.
_BREAKER = 24
_BREAKER_S = 45.0
_MONITOR_S = 0.5
#: A watched task that said nothing for so long is asked for.
_SILENCE_S = 20.0
#: A task that runs for this many times the usual is given to a second executor.
_STRAGGLER = 3.0
_STRAGGLER_FLOOR_S = 1.0
_THREADS = 96


@dataclass(eq=False)
class Attempt:
    """One task on the cluster, made for a job."""

    job: Job
    created_at: float
    running_at: float | None = None
    task: str = ""
    stream: Any = None
    speculative: bool = False


@dataclass
class Measured:
    """What answers have cost: time in the environment, and from creation to answer."""

    busy_s: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    waited_s: deque[float] = field(default_factory=lambda: deque(maxlen=200))


class Desk:
    """Attends jobs until it is closed."""

    def __init__(
        self,
        cluster: Cluster,
        session: Callable[[], Any],
        weights: Callable[[str], Reference],
        *,
        capacity: int,
        max_retries: int,
        step_deadline_s: float,
        task_deadline_s: float,
        reconnect_s: float,
        observer: Observer,
        met: Callable[[dict[str, Any]], None],
        trouble: Callable[[str], RlflameError],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._session = session
        self._weights = weights
        self._capacity = capacity
        self._max_retries = max_retries
        self._step_deadline_s = step_deadline_s
        self._task_deadline_s = task_deadline_s
        self._reconnect_s = reconnect_s
        self._observer = observer
        self._met = met
        self._trouble = trouble
        self._clock = clock
        self._lock = threading.Condition()
        self._jobs = JobQueue()
        self._attempts: list[Attempt] = []
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._failures_in_row = 0
        self._failing_since = 0.0
        self._breaker_s = _BREAKER_S
        self._closing = False
        self._over: RlflameError | None = None
        self._litter: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._speaking = threading.Lock()
        self.measured = Measured()
        self._sweeper = threading.Thread(target=self._sweep, name="rlflame-sweep", daemon=True)
        self._monitor = threading.Thread(target=self._look, name="rlflame-monitor", daemon=True)
        self._sweeper.start()
        self._monitor.start()

    # From any thread.

    def add(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self._jobs.add(jobs)
            if self._over is not None:
                self._abandon(self._over)
            else:
                self._staff()
            self._lock.notify_all()
        self._speak()

    def cancel(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self._jobs.cancel(jobs)
        self._speak()

    def end(self, error: RlflameError) -> None:
        """Nothing will be run any more, for this reason."""
        with self._lock:
            self._abandon(error)
        self._speak()

    def throw_away(self, key: str) -> None:
        """Delete an object of the cache, some time soon."""
        self._litter.put(key)

    def close(self) -> None:
        """Take nothing new and let go of all there is; threads that still wait for the cluster
        are daemons, and cut loose."""
        with self._lock:
            self._closing = True
            self._abandon(FleetError("The fleet was closed."))
            self._lock.notify_all()
            streams = [attempt.stream for attempt in self._attempts]
        self._speak()
        for stream in streams:
            close_quietly(stream)
        self._litter.put(None)
        self._sweeper.join(timeout=5.0)

    # Threads that attend attempts.

    def _staff(self) -> None:
        """As many attendants as there can be attempts."""
        wanted = min(len(self._jobs) - self._idle, _THREADS - len(self._threads))
        for _ in range(max(0, wanted)):
            thread = threading.Thread(target=self._attend, name="rlflame-attempt", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _attend(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                while not self._jobs and not self._closing:
                    self._lock.wait()
                self._idle -= 1
                if self._closing:
                    return
                attempt = Attempt(self._jobs.take(None), self._clock())
                self._attempts.append(attempt)
            self._speak()
            self._see_through(attempt)

    def _see_through(self, attempt: Attempt) -> None:
        """From a job to its answer; whatever goes wrong becomes another attempt, or an error."""
        try:
            self._carry(attempt)
        except RlflameError as error:
            self._lost(attempt, error.message)
        except Exception as error:
            self._lost(attempt, said(error))
        finally:
            with self._lock:
                self._attempts.remove(attempt)
                self._lock.notify_all()
            self._speak()

    def _carry(self, attempt: Attempt) -> None:
        session = self._session()
        job = attempt.job
        reference = self._weights(job.task.policy_id)
        payload: Any = np.frombuffer(job.payload, np.uint8)
        large = None
        if len(job.payload) > INLINE_BYTES:
            large = self._cluster.put(f"{self._application(session)}/shared", job.payload)
            payload = _as_reference(large)
        call = request("run", payload, job.task.policy_id, reference.endpoint, reference.key)
        try:
            attempt.task = self._persist(lambda: self._cluster.create(session, call))
            news = self._outcome(session, attempt)
        finally:
            if large is not None:
                self.throw_away(large.key)
        if news.state == SUCCEED and news.output is not None:
            self._answered(attempt, news.output)
        else:
            self._lost(attempt, news.message or "its executor failed without a word")

    @staticmethod
    def _application(session: Any) -> str:
        return str(session.application)

    def _outcome(self, session: Any, attempt: Attempt) -> TaskNews:
        """The task's end: watched for, and asked for wherever the watch falls silent."""

        def opened(stream: Any) -> None:
            attempt.stream = stream

        while True:
            with contextlib.suppress(Exception):  # a watch may break at any moment
                for news in self._cluster.watch(session, attempt.task, opened):
                    self._noticed(attempt, news)
                    if news.state in (SUCCEED, CANCELLED):
                        return news
                    if news.state == FAILED:
                        break
            news = self._persist(lambda: self._cluster.ask(session, attempt.task))
            self._noticed(attempt, news)
            if news.state in (SUCCEED, FAILED, CANCELLED):
                return news
            overdue = self._overdue(attempt)
            if overdue:
                return TaskNews(CANCELLED, None, overdue)
            if attempt.job.ended or self._closing:
                return TaskNews(CANCELLED, None, "nobody waits for it any more")
            time.sleep(0.5)

    def _noticed(self, attempt: Attempt, news: TaskNews) -> None:
        # A short task may have come to its end before anybody saw it run.
        if news.state in (RUNNING, SUCCEED) and attempt.running_at is None:
            attempt.running_at = self._clock()
            with self._lock:
                self._jobs.runs(attempt.job)
            self._speak()

    def _overdue(self, attempt: Attempt) -> str:
        if attempt.running_at is None:
            return ""
        for_s = self._clock() - attempt.running_at
        return f"no answer within {for_s:.0f} s" if for_s > self._task_deadline_s else ""

    def _persist(self, call: Callable[[], T]) -> T:
        """The call's result, tried again while the session manager is away."""
        deadline, pause = self._clock() + self._reconnect_s, 0.1
        while True:
            try:
                return call()
            except Exception as error:
                if self._clock() > deadline or self._closing:
                    raise FleetError(
                        f"The session manager is away: {said(error)}.", "rlflame cluster-check"
                    ) from error
            time.sleep(pause)
            pause = min(2.0, 2.0 * pause)

    # What comes of an attempt.

    def _answered(self, attempt: Attempt, output: bytes) -> None:
        if attempt.job.ended:  # somebody else was faster
            with contextlib.suppress(Exception):
                self.throw_away(_key_of(output))
            return
        content, key = self._cluster.fetch(output)
        self.throw_away(key)
        answer = wire.decode(content)
        now, job = self._clock(), attempt.job
        with self._lock:
            self._failures_in_row = 0
            self.measured.busy_s.append(float(answer["busy_s"]))
            self.measured.waited_s.append(now - attempt.created_at)
        self._met(answer["worker"])
        outcome = self._judge(job, answer)
        if outcome is not None:
            with self._lock:
                self._jobs.end(job, outcome)

    def _judge(self, job: Job, answer: dict[str, Any]) -> Fragment | RlflameError | None:
        """The job's end, or None where it has to be tried again."""
        kind, printed = answer["kind"], str(answer.get("printed", ""))
        row, seed, step = answer.get("position") or (0, 0, 0)
        if kind == "result":
            return self._fragment(job, answer, printed)
        if kind == "broken":
            return broken(job.task, answer["traceback"], printed)
        if kind == "hung":
            job.hangs += 1
            # Once may be the machine's fault; a hang repeats itself.
            if job.hangs > 1:
                return hung(job.task, (row, seed, step), self._step_deadline_s, printed)
            reason = "did not answer in time"
        elif kind == "died":
            job.deaths += 1
            if job.deaths > self._max_retries:
                return died(job, (row, seed, step), answer["how"], printed)
            reason = answer["how"]
        elif kind == "no_policy":
            self.forget_weights(job.task.policy_id)
            reason = "its weights were gone from the cache"
        else:
            reason = "its executor was told to end"
        self._again(job, reason)
        return None

    def _fragment(self, job: Job, answer: dict[str, Any], printed: str) -> Fragment | RlflameError:
        try:
            result = wire.decode(answer["body"])
            if isinstance(result, RolloutFailure):
                return environment_failure(job.task, dataclasses.replace(result, output=printed))
            return checked(job.task, result)
        except wire.WireError as error:
            return FleetError(f"A worker sent a damaged answer ({error}).", "run it again")
        except FleetError as error:
            return error

    def _again(self, job: Job, reason: str) -> None:
        with self._lock:
            attended = sum(attempt.job is job for attempt in self._attempts)
            # Where a second attempt goes on, it is that one's turn.
            if attended < 2 and not job.ended and self._over is None:
                self._jobs.again(job, reason)
                self._staff()
                self._lock.notify_all()

    #: Replaced by the fleet: weights that the cache has lost are put again.
    def forget_weights(self, policy_id: str) -> None: ...

    def _lost(self, attempt: Attempt, reason: str) -> None:
        """The cluster, and not the environment, failed the attempt."""
        job = attempt.job
        if job.ended or self._closing:
            return
        now = self._clock()
        with self._lock:
            if not self._failures_in_row:
                self._failing_since = now
            self._failures_in_row += 1
            failures = self._failures_in_row
        if failures >= _BREAKER and now - self._failing_since > self._breaker_s:
            error = self._trouble(reason)
            with self._lock:
                self._abandon(error)
            return
        # One executor may be failing all that it is given: leave others time to take something,
        # and that one time to recover.
        time.sleep(min(2.0, 0.05 * 2 ** min(failures, 6)))
        self._again(job, reason if failures == 1 else "")

    def _abandon(self, error: RlflameError) -> None:
        self._over = self._over or error
        self._jobs.abandon(self._over, [attempt.job for attempt in self._attempts])

    def _speak(self) -> None:
        """Tell the observer, one thread at a time and without the lock."""
        with self._speaking:
            while True:
                with self._lock:
                    if not self._jobs.news:
                        return
                    news = self._jobs.news.popleft()
                try:
                    self._observer(news.event)
                finally:
                    news.deliver()

    # The monitor and the sweeper.

    def _look(self) -> None:
        while not self._closing:
            time.sleep(_MONITOR_S)
            now = self._clock()
            with self._lock:
                attempts = list(self._attempts)
                waiting = len(self._jobs)
            for attempt in attempts:
                since = now - (attempt.running_at or attempt.created_at)
                if since > _SILENCE_S:
                    close_quietly(attempt.stream)  # its thread then asks
            if not waiting:
                self._speculate(attempts, now)

    def _speculate(self, attempts: list[Attempt], now: float) -> None:
        """Give stragglers a second executor, where one is free."""
        if not self.measured.busy_s:
            return
        limit = max(_STRAGGLER_FLOOR_S, _STRAGGLER * median(self.measured.busy_s))
        free = self._capacity - len(attempts)
        doubled = {id(attempt.job) for attempt in attempts if attempt.speculative}
        for attempt in attempts:
            slow = attempt.running_at is not None and now - attempt.running_at > limit
            if free <= 0 or attempt.speculative or not slow or id(attempt.job) in doubled:
                continue
            free -= 1
            task = attempt.job.task
            with self._speaking:
                self._observer(FleetEvent("speculated", task.purpose, task.slot))
            second = Attempt(attempt.job, now, speculative=True)
            with self._lock:
                self._attempts.append(second)
            threading.Thread(target=self._see_through, args=(second,), daemon=True).start()

    def _sweep(self) -> None:
        """Delete what has been used."""
        while (key := self._litter.get()) is not None:
            with contextlib.suppress(Exception):  # what stays is deleted with the run
                self._cluster.delete(key)


def _key_of(output: bytes) -> str:
    from flamepy.core import ObjectRef

    return str(ObjectRef.decode(output).key)


def _as_reference(place: Reference) -> Any:
    """An argument that the worker's side of flamepy replaces by the object itself."""
    from flamepy.core import ObjectRef

    return ObjectRef(place.endpoint, place.key, 0)
