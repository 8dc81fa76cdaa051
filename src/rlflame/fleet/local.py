"""A fleet of child processes on this machine, one BLAS thread each."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rlflame.rollout import wire
from rlflame.rollout.process.worker_process import WorkerProcess
from rlflame.rollout.task import PolicyArrays, RolloutTask
from rlflame.rollout.task_batching import merge_tasks

from .base import (
    ContextManagerMixin,
    FleetEvent,
    FleetReport,
    Observer,
    Traffic,
    TrafficMeter,
    ignore_event,
    make_policy_id,
)
from .dispatcher import Dispatcher
from .job_queue import AnswerQueue, FleetJob, JobSubmission
from .worker_pool import PoolSettings


class LocalFleet(ContextManagerMixin):
    """`capacity` child processes, alive from construction to `close()`.

    They load what the `environment` needs before there are tasks. Some of them may be `processes`
    that run already.
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
        self._lock = threading.Lock()
        self._policies: dict[str, bytes] = {}
        self._puts: Counter[str] = Counter()
        self._meter = TrafficMeter()
        self._dispatcher = Dispatcher(
            PoolSettings(workers, step_deadline_s, max_retries, show_output, environment),
            observer=observer,
            clock=clock,
            meter=self._meter,
            processes=processes,
        )

    def put(self, policy: PolicyArrays) -> str:
        name = make_policy_id(policy)
        # Encoded once, here: the bytes are a copy, and the same for every child.
        frame = wire.encode({"id": name, "arrays": dict(policy)})
        with self._lock:
            self._policies[name] = frame
            self._puts[name] += 1
            self._dispatcher.add_policy(name)
        return name

    def release(self, policy_id: str) -> None:
        with self._lock:
            self._puts[policy_id] -= 1
            if self._puts[policy_id] <= 0:
                del self._puts[policy_id]
                self._policies.pop(policy_id, None)
                self._dispatcher.forget_policy(policy_id)

    def submit(self, tasks: Sequence[RolloutTask]) -> JobSubmission:
        answers: AnswerQueue = queue.SimpleQueue()
        with self._lock:
            # Weights are bound now: releasing a policy never pulls it from under a submission.
            weights = {task.policy_id: self._policies[task.policy_id] for task in tasks}
        for task in tasks:
            self._observer(FleetEvent("submitted", task.purpose, task.slot))
        jobs: list[FleetJob] = []

        def make_jobs() -> Iterator[FleetJob]:
            for task in merge_tasks(tasks, self.capacity):
                jobs.append(FleetJob(task, wire.encode(task), weights[task.policy_id], answers))
                yield jobs[-1]

        try:
            self._dispatcher.add(make_jobs())
        except BaseException:
            self._dispatcher.cancel(jobs)
            raise
        return JobSubmission(self._dispatcher.cancel, jobs, answers)

    def probe(self) -> FleetReport:
        return FleetReport(self.name, self.capacity, tuple(self._dispatcher.wait_for_greetings()))

    def read_traffic(self) -> Traffic:
        return self._meter.read()

    def list_pids(self) -> list[int]:
        """The worker processes alive now."""
        return self._dispatcher.list_pids()

    def close(self) -> None:
        self._dispatcher.close()
