"""A fleet of child processes on this machine, one BLAS thread each.

One dispatcher thread talks to all children, so they stay busy while the learner computes. A
child that dies is replaced and its task given to another, which by design returns the same
fragment; a child whose environment does not answer is killed. Must not know: algorithms, files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

from rlflame.errors import EnvironmentFailure, FleetError, RlflameError
from rlflame.rollout import blas, wire
from rlflame.rollout.child import HEADER, Kind
from rlflame.rollout.spec import Fragment, PolicyArrays, RolloutFailure, RolloutTask

from . import FleetEvent, FleetReport, Observer, checked, environment_failure, ignore, policy_id

_PIPE_BYTES = 1 << 20
_TAIL_BYTES = 4000
_OUTPUT_LIMIT_BYTES = 1 << 20
_START_ATTEMPTS = 3


@dataclass(eq=False, repr=False)
class _Job:
    """A task on its way, and everything that happened to it."""

    task: RolloutTask
    payload: bytes
    weights: PolicyArrays
    answers: queue.SimpleQueue[Fragment | RlflameError]
    deaths: int = 0
    hangs: int = 0
    cancelled: bool = False

    @property
    def affinity(self) -> tuple[str, int] | None:
        return (self.task.run, self.task.slot) if self.task.unit == "steps" else None


@dataclass(eq=False, repr=False)
class _Child:
    """A worker process as its parent sees it."""

    process: subprocess.Popen[bytes]
    answers: int
    output: IO[bytes]
    received: bytearray = field(default_factory=bytearray)
    hello: dict[str, str] | None = None
    job: _Job | None = None
    policies: set[str] = field(default_factory=set)
    #: Where its task stood at the last beat, and when that last changed.
    position: tuple[int, int, int] = (0, 0, 0)
    moved_at: float = 0.0

    def send(self, kind: Kind, payload: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(HEADER.pack(kind, len(payload)))
        self.process.stdin.write(payload)
        self.process.stdin.flush()

    def printed(self) -> str:
        size = os.fstat(self.output.fileno()).st_size
        tail = os.pread(self.output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return tail.decode("utf-8", "replace")


class LocalFleet:
    """`capacity` child processes, alive from construction to `close()`."""

    name = "local"

    def __init__(
        self,
        workers: int,
        *,
        step_deadline_s: float = 60.0,
        max_retries: int = 3,
        show_output: bool = False,
        observer: Observer = ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = workers
        self._step_deadline_s = step_deadline_s
        self._max_retries = max_retries
        self._show_output = show_output
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._policies: dict[str, PolicyArrays] = {}
        self._puts: Counter[str] = Counter()
        self._forget: list[str] = []
        self._homes: dict[tuple[str, int], _Child] = {}
        self._failed_starts = 0
        self._fatal: FleetError | None = None
        self._closing = False
        self._greeted = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._children = [self._start() for _ in range(workers)]
        self._thread = threading.Thread(target=self._serve, name="rlflame-local", daemon=True)
        self._thread.start()

    # What callers use, from any thread.

    def put(self, policy: PolicyArrays) -> str:
        name = policy_id(policy)
        with self._lock:
            self._policies[name] = policy
            self._puts[name] += 1
        return name

    def release(self, policy_id: str) -> None:
        with self._lock:
            self._puts[policy_id] -= 1
            if self._puts[policy_id] <= 0:
                del self._puts[policy_id]
                self._policies.pop(policy_id, None)
                self._forget.append(policy_id)
        self._wake()

    def submit(self, tasks: Sequence[RolloutTask]) -> _LocalSubmission:
        answers: queue.SimpleQueue[Fragment | RlflameError] = queue.SimpleQueue()
        with self._lock:
            jobs = [
                _Job(task, wire.encode(task), self._policies[task.policy_id], answers)
                for task in tasks
            ]
            if self._fatal is not None:
                answers.put(self._fatal)
            for job in jobs:
                self._observer(FleetEvent("submitted", job.task.purpose, job.task.slot))
            self._jobs.extend(jobs)
        self._wake()
        return _LocalSubmission(self, jobs, answers)

    def cancel(self, jobs: Sequence[_Job]) -> None:
        with self._lock:
            for job in jobs:
                job.cancelled = True
            self._jobs = deque(job for job in self._jobs if not job.cancelled)

    def probe(self) -> FleetReport:
        self._greeted.wait(timeout=self._step_deadline_s)
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            said = tuple(child.hello for child in self._children if child.hello is not None)
        return FleetReport(self.name, self.capacity, said)

    def pids(self) -> list[int]:
        """The worker processes alive now."""
        with self._lock:
            return [child.process.pid for child in self._children]

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        self._thread.join()
        for child in self._children:
            with contextlib.suppress(OSError):
                assert child.process.stdin is not None
                child.process.stdin.close()
        for child in self._children:
            self._bury(child, grace_s=1.0 if child.job is None else 0.0)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> LocalFleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # The dispatcher thread.

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:  # whoever waits must hear of it rather than wait for ever
            with self._lock:
                self._give_up(f"The dispatcher failed: {error!r}.", traceback.format_exc())

    def _serve_until_closed(self) -> None:
        while True:
            for key, _ in self._selector.select(timeout=0.2):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                elif key.data in self._children:
                    self._receive(key.data)
            with self._lock:
                if self._closing:
                    return
                self._check_deadlines()
                self._dispatch()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")

    def _receive(self, child: _Child) -> None:
        data = os.read(child.answers, _PIPE_BYTES)
        if not data:
            with self._lock:
                self._lost(child)
            return
        child.received += data
        while len(child.received) >= HEADER.size:
            kind, length = HEADER.unpack_from(child.received)
            end = HEADER.size + length
            if len(child.received) < end:
                return
            payload = bytes(memoryview(child.received)[HEADER.size : end])
            del child.received[:end]
            self._frame(child, Kind(kind), payload)

    def _frame(self, child: _Child, kind: Kind, payload: bytes) -> None:
        if kind is Kind.RESULT:
            self._finished(child, payload)
            return
        message: dict[str, Any] = wire.decode(payload)
        with self._lock:
            if kind is Kind.BEAT:
                position = (message["row"], message["seed"], message["step"])
                if position != child.position:
                    child.position, child.moved_at = position, self._clock()
            elif kind is Kind.HELLO:
                child.hello = message
                self._failed_starts = 0
                if all(each.hello for each in self._children):
                    self._greeted.set()
            elif kind is Kind.BROKEN and child.job is not None:
                job, child.job = child.job, None
                job.answers.put(
                    EnvironmentFailure(
                        f"A worker could not run slot {job.task.slot}: "
                        f"{message['traceback'].strip().splitlines()[-1]}.",
                        "the traceback below is the worker's own",
                        message["traceback"] + child.printed(),
                    )
                )

    def _finished(self, child: _Child, payload: bytes) -> None:
        with self._lock:
            job, child.job = child.job, None
            if job is None:
                return
            # Feed the child before this thread spends time on what it brought.
            self._dispatch()
        outcome: Fragment | RlflameError
        try:
            result = wire.decode(payload)
            if isinstance(result, RolloutFailure):
                result = dataclasses.replace(result, output=child.printed())
                outcome = environment_failure(job.task, result)
            else:
                outcome = checked(job.task, result)
        except wire.WireError as error:
            outcome = FleetError(f"A worker sent a damaged answer ({error}).", "run it again")
        except FleetError as error:
            outcome = error
        if not job.cancelled:
            self._observer(FleetEvent("done", job.task.purpose, job.task.slot))
        job.answers.put(outcome)

    def _dispatch(self) -> None:
        """Hand queued jobs to idle children; a slot goes back to the child that last ran it."""
        for name in self._forget:
            for child in self._children:
                if name in child.policies:
                    child.policies.discard(name)
                    with contextlib.suppress(OSError):
                        child.send(Kind.FORGET, wire.encode({"id": name}))
        self._forget.clear()
        for child in self._children:
            if child.hello is None or child.job is not None or not self._jobs:
                continue
            self._give(child, self._choose(child))

    def _choose(self, child: _Child) -> _Job:
        stray = None
        for job in self._jobs:
            home = self._homes.get(job.affinity) if job.affinity else None
            if home is child:
                break
            if stray is None and home is None:
                stray = job
        else:
            job = stray or self._jobs[-1]
        self._jobs.remove(job)
        return job

    def _give(self, child: _Child, job: _Job) -> None:
        child.job = job
        child.moved_at, child.position = self._clock(), (0, 0, 0)
        if job.affinity is not None:
            self._homes[job.affinity] = child
        if os.fstat(child.output.fileno()).st_size > _OUTPUT_LIMIT_BYTES:
            os.ftruncate(child.output.fileno(), 0)
        self._observer(FleetEvent("running", job.task.purpose, job.task.slot))
        try:
            name = job.task.policy_id
            if name not in child.policies:
                message = {"id": name, "arrays": dict(job.weights)}
                child.send(Kind.POLICY, wire.encode(message))
                child.policies.add(name)
                if name not in self._policies:
                    self._forget.append(name)
            child.send(Kind.TASK, job.payload)
        except OSError:
            return  # it died; the closed pipe tells so on the next pass

    def _check_deadlines(self) -> None:
        now = self._clock()
        for child in list(self._children):
            if child.job is not None and now - child.moved_at > self._step_deadline_s:
                job, child.job = child.job, None
                row, seed, step = child.position
                job.hangs += 1
                printed = child.printed()
                self._replace(child)
                if job.hangs > 1:
                    job.answers.put(
                        EnvironmentFailure(
                            f"environment {job.task.env.id} did not answer within "
                            f"{self._step_deadline_s:g} s (slot {job.task.slot}, row {row}, "
                            f"seed {seed}, step {step}).",
                            "if its steps really take that long: --set runtime.step_deadline_s=600",
                            printed,
                        )
                    )
                else:
                    self._again(job, "did not answer in time")

    def _lost(self, child: _Child) -> None:
        """A child's pipe closed: replace it, and give its task to another."""
        job, child.job = child.job, None
        self._selector.unregister(child.answers)
        code = self._bury(child, grace_s=5.0)
        ended = _how_it_ended(code)
        printed = child.printed().strip()
        if child.hello is None:
            self._failed_starts += 1
            if self._failed_starts >= _START_ATTEMPTS:
                self._give_up(f"A worker process could not start ({ended}).", printed)
                return
        self._children[self._children.index(child)] = self._start()
        if job is None or job.cancelled:
            return
        job.deaths += 1
        if job.deaths <= self._max_retries:
            self._again(job, ended)
            return
        row, seed, step = child.position
        job.answers.put(
            FleetError(
                f"Worker processes died {job.deaths} times over slot {job.task.slot} of iteration "
                f"{job.task.iteration}, the last one {ended} (near row {row}, seed {seed}, "
                f"step {step}).",
                "signal 9 often means that memory ran out: try fewer --workers",
                printed,
            )
        )

    def _again(self, job: _Job, reason: str) -> None:
        self._observer(FleetEvent("retried", job.task.purpose, job.task.slot, reason))
        self._jobs.appendleft(job)

    def _give_up(self, message: str, detail: str) -> None:
        self._fatal = FleetError(message, "rlflame train --fleet inline shows the cause", detail)
        self._greeted.set()
        waiting = [*self._jobs, *(child.job for child in self._children if child.job)]
        self._jobs.clear()
        for job in waiting:
            job.answers.put(self._fatal)

    def _replace(self, child: _Child) -> None:
        self._selector.unregister(child.answers)
        self._bury(child, grace_s=0.0)
        self._children[self._children.index(child)] = self._start()

    def _start(self) -> _Child:
        read, write = os.pipe()
        _enlarge(read)
        output = tempfile.TemporaryFile("ab+", buffering=0)  # noqa: SIM115
        command = [sys.executable, "-m", "rlflame.rollout.child", str(write)]
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=2 if self._show_output else output,
            stderr=2 if self._show_output else output,
            pass_fds=(write,),
            env={**os.environ, **blas.child_environment(), "PYTHONPATH": path},
            start_new_session=True,
        )
        os.close(write)
        child = _Child(process, read, output, moved_at=self._clock())
        self._selector.register(read, selectors.EVENT_READ, child)
        return child

    def _bury(self, child: _Child, grace_s: float) -> int:
        """Reap a child and everything it started; safe to call for one that is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        code = child.process.wait()
        with contextlib.suppress(OSError):
            os.close(child.answers)
        with contextlib.suppress(OSError):
            assert child.process.stdin is not None
            child.process.stdin.close()
        return code


class _LocalSubmission:
    def __init__(
        self,
        fleet: LocalFleet,
        jobs: list[_Job],
        answers: queue.SimpleQueue[Fragment | RlflameError],
    ) -> None:
        self._fleet = fleet
        self._jobs = jobs
        self._answers = answers
        self._waiting = len(jobs)

    def __iter__(self) -> Iterator[Fragment]:
        while self._waiting:
            outcome = self._answers.get()
            if isinstance(outcome, RlflameError):
                self.cancel()
                raise outcome
            self._waiting -= 1
            yield outcome

    def cancel(self) -> None:
        if self._waiting:
            self._waiting = 0
            self._fleet.cancel(self._jobs)


def _enlarge(pipe: int) -> None:
    """Room for a whole fragment where the system allows it, so that a child need not wait."""
    import fcntl

    command = getattr(fcntl, "F_SETPIPE_SZ", None)
    if command is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, command, _PIPE_BYTES)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
