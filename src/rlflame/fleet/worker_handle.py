"""A worker process as the dispatcher holds it: what it has, what it was given, what it last said.

Must not know: other children, the queue, who waits for what.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Iterator

from rlflame.rollout import wire
from rlflame.rollout.process.worker_main import FrameKind
from rlflame.rollout.process.worker_process import WorkerProcess
from rlflame.rollout.spec import TaskPosition

from .base import TrafficMeter
from .jobs import FleetJob


class WorkerHandle:
    """It is sent to with the dispatcher's lock held; `selector` hears of its pipes."""

    def __init__(
        self,
        process: WorkerProcess,
        selector: selectors.BaseSelector,
        meter: TrafficMeter,
        now: float,
    ) -> None:
        self.process = process
        self.hello: dict[str, str] | None = None
        self.job: FleetJob | None = None
        #: Where its task stood at the last beat, and when that last changed.
        self.position: TaskPosition | None = None
        self.moved_at = now
        #: Between the first and the last of what belongs together: whoever comes to the lock and
        #: sees this knows that Ctrl-C came in the middle of it.
        self.is_mid_send = False
        self.policies: set[str] = set()
        #: Whether the selector tells when its pipe has room again.
        self._watches_backlog = False
        self._selector = selector
        self._meter = meter
        selector.register(process.answers, selectors.EVENT_READ, self)

    @property
    def idle(self) -> bool:
        """A process that has ended is not replaced yet, and its end is no job's doing."""
        ready = self.hello is not None and self.job is None and not self.is_mid_send
        return ready and not self.process.has_exited

    @contextlib.contextmanager
    def guard_send(self) -> Iterator[None]:
        """What is done inside belongs together; where it is interrupted, it stays unsettled."""
        self.is_mid_send = True
        yield
        self.is_mid_send = False

    def send_job(self, job: FleetJob, now: float) -> bool:
        """Send it a job, and before that the job's policy; whether it did not have that yet."""
        self.job = job
        self.moved_at, self.position = now, None
        name = job.task.policy_id
        is_new_policy = name not in self.policies
        if is_new_policy:
            self.send(FrameKind.POLICY, job.policy)
            self.policies.add(name)
        self.send(FrameKind.TASK, job.payload)
        return is_new_policy

    def forget_policy(self, policy_id: str) -> None:
        if policy_id in self.policies and not self.is_mid_send:
            with self.guard_send():
                self.policies.discard(policy_id)
                self.send(FrameKind.FORGET, wire.encode({"id": policy_id}))

    def send(self, kind: FrameKind, payload: bytes) -> None:
        self._meter.count_sent(len(payload))
        self.process.send(kind, payload)
        self.watch_backlog()

    def update_position(self, position: TaskPosition, now: float) -> None:
        if position != self.position:
            self.position, self.moved_at = position, now

    def watch_backlog(self) -> None:
        """One that is slow to read must not hold up whoever sends."""
        if self._watches_backlog == self.process.has_backlog:
            return
        self._watches_backlog = self.process.has_backlog
        if self._watches_backlog:
            self._selector.register(self.process.requests, selectors.EVENT_WRITE, self)
        else:
            self._selector.unregister(self.process.requests)

    def unwatch(self) -> None:
        for pipe in (self.process.answers, self.process.requests):
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)
