"""Manages the worker processes of a local fleet.

A worker is replaced if it dies, or if its environment does not answer in time. Its job then goes to
another worker, which returns the same fragment.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rlflame.errors import FleetError, RlflameError
from rlflame.rollout.process.channel import MessageKind, ProtocolError
from rlflame.rollout.process.worker_process import WorkerProcess, describe_exit
from rlflame.rollout.task import TaskPosition

from .base import TrafficMeter
from .job_queue import FleetJob, JobQueue
from .retry_policy import HANG_REASON, count_death, count_hang

#: The limits on consecutive failed starts. The second limit applies if a signal killed the worker,
#: because the cause may be temporary.
_START_ATTEMPTS = 3
_KILLED_START_ATTEMPTS = 12
START_DEADLINE_S = 120.0
_EXIT_GRACE_S = 5.0


@dataclass(eq=False)
class WorkerHandle:
    """A worker process, its job, and the policies that it holds."""

    #: The name of its place in the pool, which the worker that replaces it takes over.
    name: str
    process: WorkerProcess
    meter: TrafficMeter
    #: The time at which the position last changed.
    moved_at: float
    hello: dict[str, str] | None = None
    job: FleetJob | None = None
    #: The task's position (slot, row, seed and step) at the latest heartbeat.
    position: TaskPosition | None = None
    #: Whether a group of messages is being sent. If this is still true when another thread holds
    #: the lock, Ctrl-C has interrupted the sender.
    is_mid_send: bool = False
    policies: set[str] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Whether the worker can take a job. A job sent to a dead process would fail."""
        ready = self.hello is not None and self.job is None and not self.is_mid_send
        return ready and not self.process.has_exited

    @contextlib.contextmanager
    def guard_send(self) -> Iterator[None]:
        """Set `is_mid_send` while messages are sent; an interruption leaves it set."""
        self.is_mid_send = True
        yield
        self.is_mid_send = False

    def send_job(self, job: FleetJob, now: float) -> None:
        """Send a job, preceded by its policy if the worker does not have the policy."""
        self.job = job
        self.moved_at, self.position = now, None
        name = job.task.policy_id
        if name not in self.policies:
            self.process.channel.send_bytes(MessageKind.POLICY, job.policy)
            self.meter.count_sent(len(job.policy))
            self.policies.add(name)
        self.process.channel.send_bytes(MessageKind.TASK, job.payload)
        self.meter.count_sent(len(job.payload))

    def forget_policy(self, policy_id: str) -> None:
        if not self.is_mid_send:
            with self.guard_send():
                self.policies.discard(policy_id)
                size = self.process.channel.send(MessageKind.FORGET, {"id": policy_id})
                self.meter.count_sent(size)

    def update_position(self, position: TaskPosition, now: float) -> None:
        if position != self.position:
            self.position, self.moved_at = position, now


class WorkerPool:
    """The worker processes of a local fleet, and their jobs.

    The fleet holds its lock during every call except `start` and `close`.
    """

    def __init__(
        self,
        jobs: JobQueue,
        meter: TrafficMeter,
        clock: Callable[[], float],
        *,
        step_deadline_s: float,
        max_retries: int,
        show_output: bool,
        environment: str | None,
    ) -> None:
        self.workers: list[WorkerHandle] = []
        self.final_error: FleetError | None = None
        #: Set when every worker has sent HELLO, or when the fleet has ended.
        self.all_greeted = threading.Event()
        self._jobs = jobs
        self._meter = meter
        self._clock = clock
        self._step_deadline_s, self._max_retries = step_deadline_s, max_retries
        self._show_output, self._environment = show_output, environment
        #: The IDs of the policies that workers may keep.
        self.policy_ids: set[str] = set()
        self._failed_starts = 0

    def start(self, count: int, processes: Sequence[WorkerProcess]) -> None:
        """Fill the pool with the running `processes`, then with new workers."""
        for process in processes:
            self._add_worker(process)
        while len(self.workers) < count:
            self._add_worker()

    def _add_worker(self, process: WorkerProcess | None = None) -> None:
        self.workers.append(self._start_worker(f"worker-{len(self.workers) + 1}", process))

    def _start_worker(self, name: str, process: WorkerProcess | None = None) -> WorkerHandle:
        process = process or WorkerProcess(show_output=self._show_output)
        worker = WorkerHandle(name, process, self._meter, self._clock())
        if self._environment is not None:
            environment = {"id": self._environment}
            self._meter.count_sent(process.channel.send(MessageKind.PREPARE, environment))
        return worker

    def dispatch(self) -> None:
        """Send queued jobs to idle workers, and tell workers which policies to forget."""
        for worker in self.workers:
            if self._jobs and worker.idle:
                with worker.guard_send():
                    job = self._jobs.take(worker)
                    self._jobs.mark_running(job)
                    worker.send_job(job, self._clock())
        # Policies are forgotten after the jobs are sent, because callers wait for the jobs.
        for worker in self.workers:
            for name in worker.policies - self.policy_ids:
                worker.forget_policy(name)

    def greet(self, worker: WorkerHandle, hello: dict[str, str]) -> None:
        worker.hello = hello
        self._failed_starts = 0
        if all(worker.hello for worker in self.workers):
            self.all_greeted.set()

    def check_workers(self) -> None:
        """Replace workers that hang or were interrupted, and trim the stored output."""
        now = self._clock()
        for worker in list(self.workers):
            if worker.is_mid_send:
                # The worker may have received part of a message, and would misread the next one.
                self._replace_dead(worker, "was interrupted while it received a task")
                continue
            worker.process.trim_output()
            silent_s = now - worker.moved_at
            if worker.hello is None and silent_s > START_DEADLINE_S:
                self._replace_dead(worker, f"did not start within {START_DEADLINE_S:g} s")
            elif worker.job is not None and silent_s > self._step_deadline_s:
                self._replace_hanging(worker, worker.job)

    def handle_loss(self, worker: WorkerHandle, error: Exception | None = None) -> None:
        """Replace a worker that has ended or sent an invalid message."""
        if worker in self.workers:
            is_protocol_error = isinstance(error, ProtocolError)
            self._replace_dead(worker, f"sent {error}" if is_protocol_error else "")

    def _replace_hanging(self, worker: WorkerHandle, job: FleetJob) -> None:
        self._replace(worker)
        output = worker.process.read_output()
        error = count_hang(job, worker.position, self._step_deadline_s, output)
        self._finish_attempt(job, error, HANG_REASON)

    def _replace_dead(self, worker: WorkerHandle, cause: str) -> None:
        """Replace a dead worker. Requeue its job, or end it with an error.

        If `cause` is empty, the exit code is reported as the cause.
        """
        code = worker.process.terminate(grace_s=0.0 if cause else _EXIT_GRACE_S)
        attempts = _KILLED_START_ATTEMPTS if code < 0 and not cause else _START_ATTEMPTS
        cause = cause or describe_exit(code)
        output = worker.process.read_output().strip()
        self._failed_starts += worker.hello is None
        if worker.hello is None and self._failed_starts >= attempts:
            hint = "rlflame train --fleet inline shows the cause"
            message = f"A worker process could not start ({cause})."
            self.fail_all(FleetError(message, hint, output))
        self._replace(worker)
        if worker.job is not None:
            error = count_death(worker.job, worker.position, cause, output, self._max_retries)
            self._finish_attempt(worker.job, error, cause)

    def _finish_attempt(self, job: FleetJob, error: RlflameError | None, reason: str) -> None:
        if error is not None:
            self._jobs.finish(job, error)
        elif not job.is_over:
            self._jobs.requeue(job, reason)

    def _replace(self, worker: WorkerHandle) -> None:
        """End a worker, and start another one unless the fleet has ended."""
        worker.process.terminate()
        self._jobs.forget_worker(worker)
        index = self.workers.index(worker)
        is_over = self.final_error is not None
        self.workers[index : index + 1] = [] if is_over else [self._start_worker(worker.name)]

    def fail_all(self, error: FleetError) -> None:
        """End every job with the error, including jobs that are added later."""
        self.final_error = self.final_error or error
        self.all_greeted.set()
        running = [worker.job for worker in self.workers if worker.job]
        self._jobs.fail_all(self.final_error, running)

    def close(self) -> None:
        for worker in self.workers:
            worker.process.channel.close_sending()
        for worker in self.workers:
            worker.process.terminate(grace_s=1.0 if worker.job is None else 0.0)
        self.workers.clear()
