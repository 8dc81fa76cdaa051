"""Applications, sessions, tasks, executors and nodes, and their messages.

This module does not know who changes them and when.
"""

from __future__ import annotations

import platform
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from flamepy.proto import types_pb2 as pb

#: The number of failed bindings after which a session gets no more executors.
RETRY_LIMIT = 5
TERMINAL = {pb.Succeed, pb.Failed, pb.Cancelled}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Resources(NamedTuple):
    """Amounts of processors, bytes of memory and GPUs."""

    cpu: int = 0
    memory: int = 0
    gpu: int = 0

    def plus(self, other: Resources) -> Resources:
        return Resources(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Resources) -> Resources:
        return Resources(*(a - b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> Resources:
        return Resources(*(count * a for a in self))

    def at_most(self, other: Resources) -> Resources:
        return Resources(*(min(a, b) for a, b in zip(self, other, strict=True)))

    def covers(self, other: Resources) -> bool:
        return all(a >= b for a, b in zip(self, other, strict=True))

    def message(self) -> pb.ResourceRequirement:
        return pb.ResourceRequirement(cpu=self.cpu, memory=self.memory, gpu=self.gpu)


class Event(NamedTuple):
    code: int
    text: str
    time_ms: int

    def message(self) -> pb.Event:
        return pb.Event(code=self.code, message=self.text, creation_time=self.time_ms)


@dataclass(eq=False)
class Application:
    name: str
    spec: pb.ApplicationSpec
    created_ms: int = field(default_factory=now_ms)

    @property
    def delay_release_s(self) -> int:
        return max(0, self.spec.delay_release)

    @property
    def environment(self) -> dict[str, str]:
        return {variable.name: variable.value for variable in self.spec.environments}

    @property
    def python_arguments(self) -> list[str]:
        """The arguments after the interpreter, as in `uv run ... python -m module`."""
        words = list(self.spec.arguments)
        if "python" not in words:
            return ["-m", "flamepy.runner.runpy"]
        return words[words.index("python") + 1 :]

    def message(self) -> pb.Application:
        return pb.Application(
            metadata=pb.Metadata(id=self.name, name=self.name),
            spec=self.spec,
            status=pb.ApplicationStatus(state=pb.Enabled, creation_time=self.created_ms),
        )


@dataclass(eq=False)
class Task:
    id: int
    session: Session
    input: bytes | None
    changed: threading.Condition
    state: int = pb.Pending
    output: bytes | None = None
    attempts: int = 0
    created_ms: int = field(default_factory=now_ms)
    completed_ms: int | None = None
    events: list[Event] = field(default_factory=list)
    #: Watch streams carry events only after a GetTask, until the task's next change.
    shown_events: list[Event] = field(default_factory=list)

    def message(self) -> pb.Task:
        return pb.Task(
            metadata=pb.Metadata(id=str(self.id), name=str(self.id)),
            spec=pb.TaskSpec(session_id=self.session.id, input=self.input, output=self.output),
            status=pb.TaskStatus(
                state=self.state,
                creation_time=self.created_ms,
                completion_time=self.completed_ms,
                events=[event.message() for event in self.shown_events],
            ),
        )


@dataclass(eq=False)
class Session:
    id: str
    spec: pb.SessionSpec
    resreq: Resources
    order: int
    state: int = pb.Open
    created_ms: int = field(default_factory=now_ms)
    completed_ms: int | None = None
    tasks: dict[int, Task] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    bind_failures: int = 0
    #: The session was deleted, alone or with its application.
    deleted: bool = False
    counts: list[int] = field(default_factory=lambda: [0] * 5)

    @property
    def claim(self) -> int:
        """The number of executors for which the session has work."""
        wanted = max(self.spec.min_instances, self.counts[pb.Pending] + self.counts[pb.Running])
        most = self.max_instances
        return wanted if most is None else min(wanted, most)

    @property
    def max_instances(self) -> int | None:
        return self.spec.max_instances if self.spec.HasField("max_instances") else None

    def message(self, with_events: bool = False) -> pb.Session:
        return pb.Session(
            metadata=pb.Metadata(id=self.id, name=self.id),
            spec=self.spec,
            status=pb.SessionStatus(
                state=self.state,
                creation_time=self.created_ms,
                completion_time=self.completed_ms,
                pending=self.counts[pb.Pending],
                running=self.counts[pb.Running],
                succeed=self.counts[pb.Succeed],
                failed=self.counts[pb.Failed],
                cancelled=self.counts[pb.Cancelled],
                events=[event.message() for event in self.events] if with_events else [],
            ),
        )


@dataclass(eq=False)
class Executor:
    id: str
    node: str
    resreq: Resources
    session: Session
    state: int = pb.ExecutorVoid
    task: Task | None = None
    pid: int | None = None
    #: The executor stays Void, because its node never starts it.
    stuck: bool = False
    #: The executor was deleted, or its node is away. Its thread must not change anything any more.
    gone: bool = False
    #: The executor must leave its session although delay_release has not passed.
    let_go: bool = False

    @property
    def bound_to(self) -> str | None:
        between = (pb.ExecutorBinding, pb.ExecutorBound, pb.ExecutorUnbinding)
        return self.session.id if self.state in between else None

    def message(self) -> pb.Executor:
        return pb.Executor(
            metadata=pb.Metadata(id=self.id, name=self.id),
            spec=pb.ExecutorSpec(node=self.node, resreq=self.resreq.message(), shim=pb.Host),
            status=pb.ExecutorStatus(state=self.state, session_id=self.bound_to),
        )


@dataclass(eq=False)
class Node:
    name: str
    capacity: Resources
    state: int = pb.Ready

    def message(self) -> pb.Node:
        return pb.Node(
            metadata=pb.Metadata(id=self.name, name=self.name),
            spec=pb.NodeSpec(hostname=self.name),
            status=pb.NodeStatus(
                state=self.state,
                capacity=self.capacity.message(),
                allocatable=self.capacity.message(),
                info=pb.NodeInfo(arch=platform.machine(), os=platform.system().lower()),
            ),
        )
