"""What keeps worker processes busy: hands out jobs, replaces what dies, ends what hangs.

A thread does that, but whoever adds a job gives it to an idle child itself: to wake the thread, and
have it wait for the interpreter, takes longer than to send it.
A child that dies is replaced and its job given to another, which by design returns the same
fragment; a child whose environment does not answer is killed. Must not know: who submits, how
policies are counted, what fragments are for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlflame.errors import FleetError, RlflameError
from rlflame.rollout import wire
from rlflame.rollout.process.worker_main import Kind
from rlflame.rollout.process.worker_process import Garbled, WorkerProcess, how_it_ended
from rlflame.rollout.spec import Fragment, RolloutFailure

from .base import Meter, Observer, checked, environment_failure, ignore
from .jobs import Job, JobQueue, broken, died, hung, tell
from .worker_handle import Child

_TICK_S = 0.2
#: Starts that may fail in a row; more when somebody kills them, which says less of the next one.
_START_ATTEMPTS = 3
_KILLED_START_ATTEMPTS = 12
_START_DEADLINE_S = 120.0
#: Of a thread that may have begun when Ctrl-C came, or may not.
_INTERRUPTED_S = 2.0


class Dispatcher:
    """A number of children and the queue of jobs that they work through."""

    def __init__(
        self,
        workers: int,
        *,
        step_deadline_s: float,
        max_retries: int,
        show_output: bool,
        observer: Observer,
        clock: Callable[[], float],
        meter: Meter,
        environment: str | None = None,
        begun: Sequence[WorkerProcess] = (),
    ) -> None:
        self._environment = environment
        self._meter = meter
        self._step_deadline_s = step_deadline_s
        self._max_retries = max_retries
        self._show_output = show_output
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs = JobQueue()
        self._known: set[str] = set()
        self._forget: list[str] = []
        self._failed_starts = 0
        self._over: FleetError | None = None
        self._closing = False
        self._greeted = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._children: list[Child] = []
        self._served = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rlflame-fleet", daemon=True)
        serves = False
        try:
            for process in begun:
                self._children.append(self._start(process))
            while len(self._children) < workers:
                self._children.append(self._start())
            serves = True
            self._thread.start()
        except BaseException as error:
            # Ctrl-C may have come while the thread began, which must not see its children end.
            with self._lock:
                self._wake()
                self._closing = True
            # One that could not begin is a RuntimeError.
            if serves and not isinstance(error, RuntimeError):
                self._served.wait(timeout=_INTERRUPTED_S)
            self._dispose()
            if isinstance(error, OSError | RuntimeError):
                raise FleetError(
                    f"{workers} worker processes could not be started: {error}.",
                    "try fewer --workers",
                ) from error
            raise

    # From any thread.

    def know(self, policy_id: str) -> None:
        """Children may keep this policy once they have seen it."""
        with self._lock:
            self._known.add(policy_id)

    def forget(self, policy_id: str) -> None:
        with self._lock:
            self._known.discard(policy_id)
            # Nobody waits for that: it goes with what is sent next, or at the next tick.
            self._forget.append(policy_id)

    def add(self, jobs: Iterable[Job]) -> None:
        """Each goes to an idle child at once, if there is one: others may still be made.

        Where Ctrl-C comes in between, the caller has nothing to wait for and must cancel them.
        """
        for job in jobs:
            with self._lock:
                alone = not self._jobs
                self._jobs.add([job])
                if alone and self._over is None:
                    # Nobody else's jobs, which Ctrl-C must not take along.
                    self._dispatch()
        with self._lock:
            if self._over is not None:
                self._abandon(self._over)
            self._wake()
        if self._over is not None:
            self._speak()

    def cancel(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self._jobs.cancel(jobs)
            self._wake()

    def greetings(self) -> list[dict[str, str]]:
        """What every child said of itself when it began."""
        self._greeted.wait(timeout=_START_DEADLINE_S)
        with self._lock:
            if self._over is not None:
                raise self._over
            return [child.hello for child in self._children if child.hello is not None]

    def pids(self) -> list[int]:
        with self._lock:
            return [child.process.pid for child in self._children]

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._wake()
            self._closing = True
            self._abandon(FleetError("The fleet was closed.", ""))
        self._thread.join()
        self._speak()
        self._dispose()

    def _wake(self) -> None:
        """Have the thread look again; with the lock held, or the pipe may be gone."""
        if not self._closing:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes it just as well
                os.write(self._wake_write, b".")

    def _dispose(self) -> None:
        for child in self._children:
            child.process.hang_up()
        for child in self._children:
            child.process.retire(grace_s=1.0 if child.job is None else 0.0)
        self._children.clear()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # In the thread. What touches jobs, or what is sent, is called with the lock held.

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:  # whoever waits must hear of it rather than wait for ever
            with self._lock:
                self._abandon(
                    FleetError(f"The dispatcher failed: {error!r}.", "", traceback.format_exc())
                )
            self._observer = ignore
            self._speak()
        finally:
            self._served.set()

    def _serve_until_closed(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(timeout=_TICK_S):
                child: Child | None = key.data
                if child is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                elif child in self._children:
                    if events & selectors.EVENT_WRITE:
                        with self._lock:
                            child.process.flush()
                    if key.fd == child.process.answers:
                        self._receive(child)
            for child in [child for child in self._children if child.process.exited]:
                # Something it started may hold its pipe open, so that no end of file comes.
                while self._receive(child):
                    continue
                self._lost(child)
            with self._lock:
                if not self._closing:
                    self._check_children()
                    self._dispatch()
            self._speak()

    def _speak(self) -> None:
        """Tell the observer, without the lock: it may ask the fleet something in turn."""
        tell(self._jobs, self._lock, self._observer)

    def _receive(self, child: Child) -> bool:
        """Take in what a child has sent; False when there was nothing or is no more."""
        try:
            for kind, payload in child.process.receive():
                self._frame(child, kind, payload)
        except BlockingIOError:
            return False
        except EOFError:
            self._lost(child)
            return False
        except Garbled as error:
            self._lost(child, f"sent {error}")
            return False
        return True

    def _frame(self, child: Child, kind: Kind, payload: bytes) -> None:
        if kind is Kind.RESULT:
            self._meter.received(len(payload))
            self._finished(child, payload)
            return
        message = _plain(payload)
        with self._lock:
            if kind is Kind.BEAT:
                position = (message["slot"], message["row"], message["seed"], message["step"])
                child.beat(position, self._clock())
            elif kind is Kind.HELLO:
                child.hello = message
                self._failed_starts = 0
                if all(each.hello for each in self._children):
                    self._greeted.set()
            elif kind is Kind.BROKEN and child.job is not None:
                job, child.job = child.job, None
                trace = message["traceback"]
                self._jobs.end(job, broken(job.task, trace, child.process.printed()))

    def _finished(self, child: Child, payload: bytes) -> None:
        with self._lock:
            job, child.job = child.job, None
            # Feed the child before this thread spends time on what it brought.
            self._dispatch()
        if job is None or job.ended:
            return
        outcome: Fragment | RlflameError
        try:
            result = wire.decode(payload)
            if isinstance(result, RolloutFailure):
                result = dataclasses.replace(result, output=child.process.printed())
                outcome = environment_failure(job.task, result)
            else:
                outcome = checked(job.task, result)
        except wire.WireError as error:
            outcome = FleetError(f"A worker sent a damaged answer ({error}).", "run it again")
        except FleetError as error:
            outcome = error
        with self._lock:
            self._jobs.end(job, outcome)
        self._speak()

    def _dispatch(self) -> None:
        """Hand queued jobs to idle children; a slot goes back to the child that last ran it."""
        for child in self._children:
            if self._jobs and child.idle:
                with child.settled():
                    job = self._jobs.take(child)
                    self._jobs.runs(job)
                    new = child.give(job, self._clock())
                    if new and job.task.policy_id not in self._known:
                        self._forget.append(job.task.policy_id)
        # Behind the jobs, which somebody waits for.
        for name in self._forget:
            for child in self._children:
                child.forget(name)
        self._forget.clear()

    def _check_children(self) -> None:
        """Notice what no pipe tells: silence, and endless output."""
        now = self._clock()
        for child in list(self._children):
            if child.unsettled:
                # Half a frame, or one twice: it would take all that follows for something else.
                self._mourn(child, "was being given a task when that was interrupted")
                continue
            child.watch_backlog()
            child.process.trim_output()
            silent_s = now - child.moved_at
            if child.hello is None and silent_s > _START_DEADLINE_S:
                self._mourn(child, f"did not start within {_START_DEADLINE_S:g} s")
            elif child.job is not None and silent_s > self._step_deadline_s:
                self._hung(child, child.job)

    def _hung(self, child: Child, job: Job) -> None:
        self._replace(child)
        job.hangs += 1
        # Once may be the machine's fault (it slept, it swapped); a hang repeats itself.
        if job.hangs > 1:
            printed = child.process.printed()
            self._jobs.end(job, hung(job.task, child.position, self._step_deadline_s, printed))
        elif not job.ended:
            self._jobs.again(job, "did not answer in time")

    def _lost(self, child: Child, how: str = "") -> None:
        with self._lock:
            if child in self._children:
                self._mourn(child, how)

    def _mourn(self, child: Child, how: str = "") -> None:
        """A child is no more: put another in its place, and give its task to somebody else."""
        child.unwatch()
        code = child.process.retire(grace_s=0.0 if how else 5.0)
        attempts = _KILLED_START_ATTEMPTS if code < 0 and not how else _START_ATTEMPTS
        how = how or how_it_ended(code)
        printed = child.process.printed().strip()
        self._failed_starts += child.hello is None
        if child.hello is None and self._failed_starts >= attempts:
            hint = "rlflame train --fleet inline shows the cause"
            message = f"A worker process could not start ({how})."
            self._abandon(FleetError(message, hint, printed))
        self._replace(child)
        job = child.job
        if job is None:
            return
        job.deaths += 1
        if job.deaths > self._max_retries:
            self._jobs.end(job, died(job, child.position, how, printed))
        elif not job.ended:
            self._jobs.again(job, how)

    def _abandon(self, error: FleetError) -> None:
        """Nothing will be run any more: say so to everybody who waits, now or later."""
        self._over = self._over or error
        self._greeted.set()
        running = [child.job for child in self._children if child.job]
        self._jobs.abandon(self._over, running)

    def _replace(self, child: Child) -> None:
        """Another process where this one was; none once the fleet is over."""
        child.unwatch()
        child.process.retire()
        self._jobs.leave(child)
        place = self._children.index(child)
        self._children[place : place + 1] = [self._start()] if self._over is None else []

    def _start(self, process: WorkerProcess | None = None) -> Child:
        process = process or WorkerProcess(show_output=self._show_output)
        child = Child(process, self._selector, self._meter, self._clock())
        if self._environment is not None:
            child.send(Kind.PREPARE, wire.encode({"id": self._environment}))
        return child


def _plain(payload: bytes) -> dict[str, Any]:
    """A child's small talk."""
    try:
        message = wire.decode(payload)
    except wire.WireError as error:
        raise Garbled(f"a damaged frame ({error})") from error
    if not isinstance(message, dict):
        raise Garbled("a frame without names")
    return message
