"""A cluster at one moment, as values that can be compared with those of another.

Must not know: what is good or bad about them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlflame.fleet.flame.client import BIND_FAILED, EXECUTOR_STATES, SESSION_PAUSED, FlameClient

NODE_STATES = ("Unknown", "Ready", "NotReady")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    state: str
    cpu: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Executor:
    id: str
    node: str
    state: str
    session: str
    cpu: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ClusterSession:
    """An open session."""

    id: str
    application: str
    pending: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    #: Flame gives it no executors any more.
    paused: bool = False
    #: What the last executor said that could not take it up.
    problem: str = ""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return (self.pending, self.running, self.succeeded, self.failed)


@dataclass(frozen=True, slots=True)
class Application:
    name: str
    description: str = ""
    #: It has a package that executors install before they serve it.
    installs: bool = False


@dataclass(frozen=True)
class ClusterSnapshot:
    at_s: float
    nodes: tuple[Node, ...] = ()
    executors: tuple[Executor, ...] = ()
    #: The open ones.
    sessions: tuple[ClusterSession, ...] = ()
    applications: tuple[Application, ...] = ()
    _sessions: dict[str, ClusterSession] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sessions", {session.id: session for session in self.sessions})

    @property
    def ready_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.state == "Ready"]

    def find_session(self, session_id: str) -> ClusterSession | None:
        return self._sessions.get(session_id)

    def count_free(self, node: Node) -> tuple[int, int]:
        """Processors and bytes that no executor has been granted."""
        executors = [executor for executor in self.executors if executor.node == node.name]
        return (
            node.cpu - sum(executor.cpu for executor in executors),
            node.memory_bytes - sum(executor.memory_bytes for executor in executors),
        )

    @property
    def room(self) -> int:
        """How many more executors of one processor and one GiB there is room for."""
        room = 0
        for node in self.ready_nodes:
            cpu, memory_bytes = self.count_free(node)
            room += max(0, min(cpu, memory_bytes // GIB))
        return room


def take_snapshot(client: FlameClient, at_s: float) -> ClusterSnapshot:
    """Look at everything once; raises FleetError where the session manager does not answer."""
    nodes = [
        Node(
            node.metadata.name,
            NODE_STATES[node.status.state],
            int(node.status.capacity.cpu),
            int(node.status.capacity.memory),
        )
        for node in client.list_nodes()
    ]
    executors = [
        Executor(
            executor.metadata.id,
            executor.spec.node,
            EXECUTOR_STATES[executor.status.state],
            executor.status.session_id,
            int(executor.spec.resreq.cpu),
            int(executor.spec.resreq.memory),
        )
        for executor in client.list_executors()
    ]
    sessions = []
    for session in client.list_sessions():
        if session.state != 0:
            continue
        codes = [event.code for event in session.events]
        texts = [event.message for event in session.events if event.code == BIND_FAILED]
        sessions.append(
            ClusterSession(
                session.id,
                session.application,
                session.pending,
                session.running,
                session.succeed,
                session.failed,
                SESSION_PAUSED in codes,
                texts[-1] if texts else "",
            )
        )
    applications = [
        Application(application.name, application.description or "", bool(application.url))
        for application in client.list_applications()
    ]
    return ClusterSnapshot(
        at_s, tuple(nodes), tuple(executors), tuple(sessions), tuple(applications)
    )
