"""A worker process as the dispatcher holds it: what it has, what it was given, what it last said.

Must not know: other children, the queue, who waits for what.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Iterator

from rlflame.rollout import wire
from rlflame.rollout.process.worker_main import Kind
from rlflame.rollout.process.worker_process import WorkerProcess
from rlflame.rollout.spec import Whereabouts

from .base import Meter
from .jobs import Job


class Child:
    """It is sent to with the dispatcher's lock held; `selector` hears of its pipes."""

    def __init__(
        self, process: WorkerProcess, selector: selectors.BaseSelector, meter: Meter, now: float
    ) -> None:
        self.process = process
        self.hello: dict[str, str] | None = None
        self.job: Job | None = None
        #: Where its task stood at the last beat, and when that last changed.
        self.position: Whereabouts | None = None
        self.moved_at = now
        #: Between the first and the last of what belongs together: whoever comes to the lock and
        #: sees this knows that Ctrl-C came in the middle of it.
        self.unsettled = False
        self.policies: set[str] = set()
        #: Whether the selector tells when its pipe has room again.
        self._backlog = False
        self._selector = selector
        self._meter = meter
        selector.register(process.answers, selectors.EVENT_READ, self)

    @property
    def idle(self) -> bool:
        """A process that has ended is not replaced yet, and its end is no job's doing."""
        ready = self.hello is not None and self.job is None and not self.unsettled
        return ready and not self.process.exited

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """What is done inside belongs together; where it is interrupted, it stays unsettled."""
        self.unsettled = True
        yield
        self.unsettled = False

    def give(self, job: Job, now: float) -> bool:
        """Send it a job, and before that the job's policy; whether it did not have that yet."""
        self.job = job
        self.moved_at, self.position = now, None
        name = job.task.policy_id
        new = name not in self.policies
        if new:
            self.send(Kind.POLICY, job.policy)
            self.policies.add(name)
        self.send(Kind.TASK, job.payload)
        return new

    def forget(self, policy_id: str) -> None:
        if policy_id in self.policies and not self.unsettled:
            with self.settled():
                self.policies.discard(policy_id)
                self.send(Kind.FORGET, wire.encode({"id": policy_id}))

    def send(self, kind: Kind, payload: bytes) -> None:
        self._meter.sent(len(payload))
        self.process.send(kind, payload)
        self.watch_backlog()

    def beat(self, position: Whereabouts, now: float) -> None:
        if position != self.position:
            self.position, self.moved_at = position, now

    def watch_backlog(self) -> None:
        """One that is slow to read must not hold up whoever sends."""
        if self._backlog == self.process.backlog:
            return
        self._backlog = self.process.backlog
        if self._backlog:
            self._selector.register(self.process.requests, selectors.EVENT_WRITE, self)
        else:
            self._selector.unregister(self.process.requests)

    def unwatch(self) -> None:
        for pipe in (self.process.answers, self.process.requests):
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)
