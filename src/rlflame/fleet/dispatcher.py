"""What keeps worker processes busy: hands out jobs, replaces what dies, ends what hangs.

A thread does that, but whoever adds a job gives it to an idle child itself: to wake the thread, and
have it wait for the interpreter, takes longer than to send it.
A child that dies is replaced and its job given to another, which by design returns the same
fragment; a child whose environment does not answer is killed. Must not know: who submits, how
policies are counted, what fragments are for.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlflame.errors import FleetError
from rlflame.rollout import wire
from rlflame.rollout.process.worker_main import FrameKind
from rlflame.rollout.process.worker_process import ProtocolError, WorkerProcess, describe_exit

from .base import Observer, TrafficMeter, ignore_event
from .jobs import FleetJob, JobQueue, deliver_notifications
from .retry_policy import (
    HANG_REASON,
    count_death,
    count_hang,
    decode_result,
    make_broken_worker_error,
)
from .worker_handle import WorkerHandle

_TICK_S = 0.2
#: Starts that may fail in a row; more when somebody kills them, which says less of the next one.
_START_ATTEMPTS = 3
_KILLED_START_ATTEMPTS = 12
_START_DEADLINE_S = 120.0
#: Of a thread that may have begun when Ctrl-C came, or may not.
_INTERRUPT_WAIT_S = 2.0


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
        meter: TrafficMeter,
        environment: str | None = None,
        processes: Sequence[WorkerProcess] = (),
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
        self._policy_ids: set[str] = set()
        self._dropped_policy_ids: list[str] = []
        self._failed_starts = 0
        self._final_error: FleetError | None = None
        self._closing = False
        self._all_greeted = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._workers: list[WorkerHandle] = []
        self._thread_done = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rlflame-fleet", daemon=True)
        starts_thread = False
        try:
            for process in processes:
                self._workers.append(self._start_worker(process))
            while len(self._workers) < workers:
                self._workers.append(self._start_worker())
            starts_thread = True
            self._thread.start()
        except BaseException as error:
            # Ctrl-C may have come while the thread began, which must not see its children end.
            with self._lock:
                self._wake()
                self._closing = True
            # One that could not begin is a RuntimeError.
            if starts_thread and not isinstance(error, RuntimeError):
                self._thread_done.wait(timeout=_INTERRUPT_WAIT_S)
            self._dispose()
            if isinstance(error, OSError | RuntimeError):
                raise FleetError(
                    f"{workers} worker processes could not be started: {error}.",
                    "try fewer --workers",
                ) from error
            raise

    # From any thread.

    def add_policy(self, policy_id: str) -> None:
        """Children may keep this policy once they have seen it."""
        with self._lock:
            self._policy_ids.add(policy_id)

    def forget_policy(self, policy_id: str) -> None:
        with self._lock:
            self._policy_ids.discard(policy_id)
            # Nobody waits for that: it goes with what is sent next, or at the next tick.
            self._dropped_policy_ids.append(policy_id)

    def add(self, jobs: Iterable[FleetJob]) -> None:
        """Each goes to an idle child at once, if there is one: others may still be made.

        Where Ctrl-C comes in between, the caller has nothing to wait for and must cancel them.
        """
        for job in jobs:
            with self._lock:
                was_empty = not self._jobs
                self._jobs.add([job])
                if was_empty and self._final_error is None:
                    # Nobody else's jobs, which Ctrl-C must not take along.
                    self._dispatch()
        with self._lock:
            if self._final_error is not None:
                self._fail_all(self._final_error)
            self._wake()
        if self._final_error is not None:
            self._notify_observer()

    def cancel(self, jobs: Sequence[FleetJob]) -> None:
        with self._lock:
            self._jobs.cancel(jobs)
            self._wake()

    def wait_for_greetings(self) -> list[dict[str, str]]:
        """What every child said of itself when it began."""
        self._all_greeted.wait(timeout=_START_DEADLINE_S)
        with self._lock:
            if self._final_error is not None:
                raise self._final_error
            return [worker.hello for worker in self._workers if worker.hello is not None]

    def list_pids(self) -> list[int]:
        with self._lock:
            return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._wake()
            self._closing = True
            self._fail_all(FleetError("The fleet was closed.", ""))
        self._thread.join()
        self._notify_observer()
        self._dispose()

    def _wake(self) -> None:
        """Have the thread look again; with the lock held, or the pipe may be gone."""
        if not self._closing:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes it just as well
                os.write(self._wake_write, b".")

    def _dispose(self) -> None:
        for worker in self._workers:
            worker.process.close_pipe()
        for worker in self._workers:
            worker.process.terminate(grace_s=1.0 if worker.job is None else 0.0)
        self._workers.clear()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # In the thread. What touches jobs, or what is sent, is called with the lock held.

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:  # whoever waits must hear of it rather than wait for ever
            with self._lock:
                self._fail_all(
                    FleetError(f"The dispatcher failed: {error!r}.", "", traceback.format_exc())
                )
            self._observer = ignore_event
            self._notify_observer()
        finally:
            self._thread_done.set()

    def _serve_until_closed(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(timeout=_TICK_S):
                worker: WorkerHandle | None = key.data
                if worker is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                elif worker in self._workers:
                    if events & selectors.EVENT_WRITE:
                        with self._lock:
                            worker.process.flush()
                    if key.fd == worker.process.answers:
                        self._receive(worker)
            for worker in [worker for worker in self._workers if worker.process.has_exited]:
                # Something it started may hold its pipe open, so that no end of file comes.
                while self._receive(worker):
                    continue
                self._handle_loss(worker)
            with self._lock:
                if not self._closing:
                    self._check_workers()
                    self._dispatch()
            self._notify_observer()

    def _notify_observer(self) -> None:
        """Tell the observer, without the lock: it may ask the fleet something in turn."""
        deliver_notifications(self._jobs, self._lock, self._observer)

    def _receive(self, worker: WorkerHandle) -> bool:
        """Take in what a child has sent; False when there was nothing or is no more."""
        try:
            for kind, payload in worker.process.receive():
                self._handle_frame(worker, kind, payload)
        except BlockingIOError:
            return False
        except EOFError:
            self._handle_loss(worker)
            return False
        except ProtocolError as error:
            self._handle_loss(worker, f"sent {error}")
            return False
        return True

    def _handle_frame(self, worker: WorkerHandle, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.RESULT:
            self._meter.count_received(len(payload))
            self._handle_result(worker, payload)
            return
        message = _decode_message(payload)
        with self._lock:
            if kind is FrameKind.BEAT:
                position = (message["slot"], message["row"], message["seed"], message["step"])
                worker.update_position(position, self._clock())
            elif kind is FrameKind.HELLO:
                worker.hello = message
                self._failed_starts = 0
                if all(other.hello for other in self._workers):
                    self._all_greeted.set()
            elif kind is FrameKind.BROKEN and worker.job is not None:
                job, worker.job = worker.job, None
                trace = message["traceback"]
                self._jobs.finish(
                    job, make_broken_worker_error(job.task, trace, worker.process.read_output())
                )

    def _handle_result(self, worker: WorkerHandle, payload: bytes) -> None:
        with self._lock:
            job, worker.job = worker.job, None
            # Feed the child before this thread spends time on what it brought.
            self._dispatch()
        if job is None or job.ended:
            return
        outcome = decode_result(job.task, payload, worker.process.read_output())
        with self._lock:
            self._jobs.finish(job, outcome)
        self._notify_observer()

    def _dispatch(self) -> None:
        """Hand queued jobs to idle children; a slot goes back to the child that last ran it."""
        for worker in self._workers:
            if self._jobs and worker.idle:
                with worker.guard_send():
                    job = self._jobs.take(worker)
                    self._jobs.mark_running(job)
                    is_new_policy = worker.send_job(job, self._clock())
                    if is_new_policy and job.task.policy_id not in self._policy_ids:
                        self._dropped_policy_ids.append(job.task.policy_id)
        # Behind the jobs, which somebody waits for.
        for name in self._dropped_policy_ids:
            for worker in self._workers:
                worker.forget_policy(name)
        self._dropped_policy_ids.clear()

    def _check_workers(self) -> None:
        """Notice what no pipe tells: silence, and endless output."""
        now = self._clock()
        for worker in list(self._workers):
            if worker.is_mid_send:
                # Half a frame, or one twice: it would take all that follows for something else.
                self._replace_dead(worker, "was being given a task when that was interrupted")
                continue
            worker.watch_backlog()
            worker.process.trim_output()
            silent_s = now - worker.moved_at
            if worker.hello is None and silent_s > _START_DEADLINE_S:
                self._replace_dead(worker, f"did not start within {_START_DEADLINE_S:g} s")
            elif worker.job is not None and silent_s > self._step_deadline_s:
                self._handle_hang(worker, worker.job)

    def _handle_hang(self, worker: WorkerHandle, job: FleetJob) -> None:
        self._replace(worker)
        printed = worker.process.read_output()
        error = count_hang(job, worker.position, self._step_deadline_s, printed)
        if error is not None:
            self._jobs.finish(job, error)
        elif not job.ended:
            self._jobs.requeue(job, HANG_REASON)

    def _handle_loss(self, worker: WorkerHandle, cause: str = "") -> None:
        with self._lock:
            if worker in self._workers:
                self._replace_dead(worker, cause)

    def _replace_dead(self, worker: WorkerHandle, cause: str = "") -> None:
        """A child is no more: put another in its place, and give its task to somebody else."""
        worker.unwatch()
        code = worker.process.terminate(grace_s=0.0 if cause else 5.0)
        attempts = _KILLED_START_ATTEMPTS if code < 0 and not cause else _START_ATTEMPTS
        cause = cause or describe_exit(code)
        printed = worker.process.read_output().strip()
        self._failed_starts += worker.hello is None
        if worker.hello is None and self._failed_starts >= attempts:
            hint = "rlflame train --fleet inline shows the cause"
            message = f"A worker process could not start ({cause})."
            self._fail_all(FleetError(message, hint, printed))
        self._replace(worker)
        job = worker.job
        if job is None:
            return
        error = count_death(job, worker.position, cause, printed, self._max_retries)
        if error is not None:
            self._jobs.finish(job, error)
        elif not job.ended:
            self._jobs.requeue(job, cause)

    def _fail_all(self, error: FleetError) -> None:
        """Nothing will be run any more: say so to everybody who waits, now or later."""
        self._final_error = self._final_error or error
        self._all_greeted.set()
        running = [worker.job for worker in self._workers if worker.job]
        self._jobs.fail_all(self._final_error, running)

    def _replace(self, worker: WorkerHandle) -> None:
        """Another process where this one was; none once the fleet is over."""
        worker.unwatch()
        worker.process.terminate()
        self._jobs.forget_worker(worker)
        index = self._workers.index(worker)
        self._workers[index : index + 1] = (
            [self._start_worker()] if self._final_error is None else []
        )

    def _start_worker(self, process: WorkerProcess | None = None) -> WorkerHandle:
        process = process or WorkerProcess(show_output=self._show_output)
        worker = WorkerHandle(process, self._selector, self._meter, self._clock())
        if self._environment is not None:
            worker.send(FrameKind.PREPARE, wire.encode({"id": self._environment}))
        return worker


def _decode_message(payload: bytes) -> dict[str, Any]:
    """A child's small talk."""
    try:
        message = wire.decode(payload)
    except wire.WireError as error:
        raise ProtocolError(f"a damaged frame ({error})") from error
    if not isinstance(message, dict):
        raise ProtocolError("a frame without names")
    return message
