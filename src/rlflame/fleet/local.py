"""A fleet of child processes on this machine, each with one BLAS thread.

A dispatcher thread receives results and sends further tasks. `submit` itself sends tasks to idle
workers, because the dispatcher thread would first have to wake up and wait for the GIL.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rlflame.errors import FleetError
from rlflame.rollout import wire
from rlflame.rollout.process.channel import Message, MessageKind, ProtocolError, WakePipe, wait
from rlflame.rollout.process.worker_process import WorkerProcess
from rlflame.rollout.task import PolicyArrays, RolloutTask
from rlflame.rollout.task_batching import merge_tasks

from .base import (
    ContextManagerMixin,
    FleetEvent,
    Observer,
    Traffic,
    TrafficMeter,
    ignore_event,
    make_policy_id,
)
from .job_queue import AnswerQueue, FleetJob, JobQueue, JobSubmission
from .retry_policy import decode_result, make_broken_worker_error
from .worker_pool import START_DEADLINE_S, WorkerHandle, WorkerPool

_TICK_S = 0.2
#: How long to wait for the end of a thread whose start was interrupted by Ctrl-C.
_INTERRUPT_WAIT_S = 2.0


class LocalFleet(ContextManagerMixin):
    """Runs tasks in `workers` child processes until `close()`.

    Workers import the code of `environment` before they receive tasks. The `processes` are already
    running, and become the first workers. All public methods are thread-safe.
    """

    name = "local"
    ready = True

    def __init__(
        self,
        workers: int,
        *,
        step_deadline_s: float = 60.0,
        max_retries: int = 3,
        show_output: bool = False,
        observer: Observer = ignore_event,
        clock: Callable[[], float] = time.monotonic,
        environment: str | None = None,
        processes: Sequence[WorkerProcess] = (),
    ) -> None:
        self.capacity = workers
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()
        self._policies: dict[str, bytes] = {}
        self._puts: Counter[str] = Counter()
        self._meter = TrafficMeter()
        self._jobs = JobQueue()
        self._pool = WorkerPool(
            self._jobs,
            self._meter,
            clock,
            step_deadline_s=step_deadline_s,
            max_retries=max_retries,
            show_output=show_output,
            environment=environment,
        )
        self._closing = False
        self._wake_pipe = WakePipe()
        self._thread_done = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rlflame-fleet", daemon=True)
        try:
            self._pool.start(workers, processes)
            self._start_thread()
        except BaseException as error:
            self._dispose()
            if not isinstance(error, OSError | RuntimeError):
                raise
            message = f"{workers} worker processes could not be started: {error}."
            raise FleetError(message, "try fewer --workers") from error

    def _start_thread(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # the thread did not start
            raise
        except BaseException:
            # Ctrl-C may have arrived during the start. End the thread before the workers.
            with self._lock:
                self._closing = True
            self._wake_pipe.wake()
            self._thread_done.wait(timeout=_INTERRUPT_WAIT_S)
            raise

    def put(self, policy: PolicyArrays) -> str:
        name = make_policy_id(policy)
        # Encode once: the bytes are a copy of the arrays, and all workers receive the same bytes.
        frame = wire.encode({"id": name, "arrays": dict(policy)})
        with self._lock:
            self._policies[name] = frame
            self._puts[name] += 1
            self._pool.policy_ids.add(name)
        return name

    def release(self, policy_id: str) -> None:
        """Release a policy. After the last release, tell the workers to discard it."""
        with self._lock:
            self._puts[policy_id] -= 1
            if self._puts[policy_id] <= 0:
                del self._puts[policy_id]
                self._policies.pop(policy_id, None)
                self._pool.policy_ids.discard(policy_id)

    def submit(self, tasks: Sequence[RolloutTask]) -> JobSubmission:
        answers: AnswerQueue = queue.SimpleQueue()
        with self._lock:
            # Look up the weights now, so that a later `release` does not affect the submission.
            weights = {task.policy_id: self._policies[task.policy_id] for task in tasks}
        for task in tasks:
            self._observer(FleetEvent("submitted", task.purpose, task.slot))
        jobs: list[FleetJob] = []

        def make_jobs() -> Iterator[FleetJob]:
            for task in merge_tasks(tasks, self.capacity):
                jobs.append(FleetJob(task, wire.encode(task), weights[task.policy_id], answers))
                yield jobs[-1]

        try:
            self._add(make_jobs())
        except BaseException:
            self.cancel(jobs)
            raise
        return JobSubmission(self.cancel, jobs, answers)

    def _add(self, jobs: Iterable[FleetJob]) -> None:
        """Queue each job, and send it if a worker is idle, before creating the next job."""
        # If Ctrl-C interrupts this method, the caller must cancel the jobs.
        for job in jobs:
            with self._lock:
                was_empty = not self._jobs
                self._jobs.add([job])
                if was_empty and self._pool.final_error is None:
                    # Only this job is queued, so Ctrl-C does not affect jobs of other callers.
                    try:
                        self._pool.dispatch()
                    except BaseException:
                        # Cancel the job before the dispatcher replaces the worker and counts a
                        # failure.
                        self._jobs.cancel([job])
                        raise
        with self._lock:
            final_error = self._pool.final_error
            if final_error is not None:
                self._pool.fail_all(final_error)
        self._wake_pipe.wake()
        if final_error is not None:
            self._notify_observer()

    def cancel(self, jobs: Sequence[FleetJob]) -> None:
        with self._lock:
            self._jobs.cancel(jobs)
        self._wake_pipe.wake()

    def probe(self) -> list[dict[str, Any]]:
        self._pool.all_greeted.wait(timeout=START_DEADLINE_S)
        with self._lock:
            if self._pool.final_error is not None:
                raise self._pool.final_error
            return [worker.hello for worker in self._pool.workers if worker.hello is not None]

    def read_traffic(self) -> Traffic:
        return self._meter.read()

    def list_pids(self) -> list[int]:
        """Return the process IDs of the current workers."""
        with self._lock:
            return [worker.process.pid for worker in self._pool.workers]

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._pool.fail_all(FleetError("The fleet was closed."))
        self._wake_pipe.wake()
        self._thread.join()
        self._notify_observer()
        self._dispose()

    def _dispose(self) -> None:
        self._pool.close()
        self._wake_pipe.close()

    def _notify_observer(self) -> None:
        """Deliver events and outcomes. The caller must not hold the lock."""
        self._jobs.deliver_news(self._lock, self._observer)

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:  # otherwise callers would wait forever
            with self._lock:
                self._pool.fail_all(
                    FleetError(f"The dispatcher failed: {error!r}.", "", traceback.format_exc())
                )
            self._observer = ignore_event
            self._notify_observer()
        finally:
            self._thread_done.set()

    def _serve_until_closed(self) -> None:
        while not self._closing:
            worker_by_channel = {worker.process.channel: worker for worker in self._pool.workers}
            for channel in wait(worker_by_channel, _TICK_S, self._wake_pipe):
                self._receive(worker_by_channel[channel])
            for worker in [worker for worker in self._pool.workers if worker.process.has_exited]:
                # No EOF arrives if a program that the worker started keeps the worker's pipe open.
                self._receive(worker)
                with self._lock:
                    self._pool.handle_loss(worker)
            with self._lock:
                if not self._closing:
                    self._pool.check_workers()
                    self._pool.dispatch()
            self._notify_observer()

    def _receive(self, worker: WorkerHandle) -> None:
        try:
            for message in worker.process.channel.receive_all():
                self._handle_message(worker, message)
        except (EOFError, ProtocolError) as error:
            with self._lock:
                self._pool.handle_loss(worker, error)

    def _handle_message(self, worker: WorkerHandle, message: Message) -> None:
        if message.kind is MessageKind.RESULT:
            self._handle_result(worker, message.payload)
            return
        value = message.value
        if not isinstance(value, dict):
            raise ProtocolError("a frame without named fields")
        with self._lock:
            if message.kind is MessageKind.BEAT:
                position = (value["slot"], value["row"], value["seed"], value["step"])
                worker.update_position(position, self._clock())
            elif message.kind is MessageKind.HELLO:
                self._pool.greet(worker, value)
            elif message.kind is MessageKind.BROKEN and worker.job is not None:
                output = worker.process.read_output()
                error = make_broken_worker_error(worker.job.task, value["traceback"], output)
                self._jobs.finish(worker.job, error)
                worker.job = None

    def _handle_result(self, worker: WorkerHandle, payload: bytes) -> None:
        self._meter.count_received(len(payload))
        with self._lock:
            job, worker.job = worker.job, None
            # Send the next job before this thread spends time on the result.
            self._pool.dispatch()
        if job is None or job.is_over:
            return
        outcome = decode_result(job.task, payload, worker.process.read_output)
        with self._lock:
            self._jobs.finish(job, outcome, worker.name)
        self._notify_observer()
