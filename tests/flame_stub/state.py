"""The session manager's state: one lock, and all changes of its objects.

This module does not know gRPC, worker processes or the object cache. A refusal is an exception with
the status code and the text of Flame with file system storage.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable

from flamepy.proto import types_pb2 as pb

from flame_stub import scheduling
from flame_stub.faults import Faults
from flame_stub.records import (
    RETRY_LIMIT,
    TERMINAL,
    Application,
    Event,
    Executor,
    Node,
    Resources,
    Session,
    Task,
    now_ms,
)
from flame_stub.rules import already, compare, complete, internal, invalid, not_found

BIND_FAILED, RETRY_LIMIT_REACHED = 1001, 1002
NAMES = {pb.Pending: "Pending", pb.Running: "Running", pb.Succeed: "Succeed", pb.Failed: "Failed"}
NAMES[pb.Cancelled] = "Cancelled"


class State:
    """All methods take the lock. `changed` notifies executors of changes."""

    def __init__(self, nodes: Iterable[Node], policies: Iterable[str], faults: Faults) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.faults = faults
        self.policies = frozenset(policies)
        self.nodes = {node.name: node for node in nodes}
        self.applications: dict[str, Application] = {}
        self.sessions: dict[str, Session] = {}
        self.executors: dict[str, Executor] = {}
        self.online = True
        self.closing = False
        self._order = itertools.count()
        #: Starts the thread of a new executor.
        self.start: Callable[[Executor], None] = lambda executor: None
        faults.listen(self.settle)

    def settle(self) -> None:
        """Create the executors that are due, and notify all waiting threads."""
        with self.lock:
            while self.online and not self.closing and not self.faults.no_executors:
                due = scheduling.next_executor(self)
                if due is None:
                    break
                session, node = due
                executor = Executor(str(uuid.uuid4()), node.name, session.resreq, session)
                executor.stuck = self.faults.stuck_void
                self.executors[executor.id] = executor
                self.start(executor)
            self.changed.notify_all()

    def pause(self, fault: str) -> None:
        """Wait for the seconds of a fault, which may change, or until the stub closes."""
        with self.lock:
            began = time.monotonic()
            while self.online and not self.closing:
                left = began + getattr(self.faults, fault) - time.monotonic()
                if left <= 0:
                    return
                self.changed.wait(left)

    # Applications

    def application(self, name: str) -> Application:
        with self.lock:
            found = self.applications.get(name)
            if found is None or (name == "flmrun" and self.faults.flmrun_missing):
                raise not_found(f"Application {name} not found: No such file or directory")
            return found

    def register(self, name: str, spec: pb.ApplicationSpec) -> None:
        with self.lock:
            if name in self.applications:
                raise already(f"Application '{name}' already exists")
            self._accept(name, spec)

    def update(self, name: str, spec: pb.ApplicationSpec) -> None:
        with self.lock:
            self.application(name)
            if self._open_sessions(name):
                raise internal(f"Cannot update application '{name}': has open sessions")
            self._accept(name, spec)

    def unregister(self, name: str) -> None:
        with self.lock:
            if self._open_sessions(name):
                raise internal(f"Cannot unregister application '{name}': has open sessions")
            if self.applications.pop(name, None) is None:
                raise internal(f"Failed to delete application '{name}': No such file or directory")
            for session in [s for s in self.sessions.values() if s.spec.application == name]:
                self._delete(session)

    def _accept(self, name: str, spec: pb.ApplicationSpec) -> None:
        kept = pb.ApplicationSpec()
        kept.CopyFrom(spec)
        if not kept.HasField("delay_release"):
            kept.delay_release = 60
        if not kept.HasField("max_instances"):
            kept.max_instances = 1_000_000
        self.applications[name] = Application(name, kept)

    def _open_sessions(self, application: str) -> list[Session]:
        sessions = self.sessions.values()
        return [s for s in sessions if s.spec.application == application and s.state == pb.Open]

    # Sessions

    def session(self, session_id: str) -> Session:
        with self.lock:
            if session_id not in self.sessions:
                raise not_found(session_id)
            return self.sessions[session_id]

    def create_session(self, session_id: str, spec: pb.SessionSpec) -> Session:
        with self.lock:
            self.application(spec.application)
            if session_id in self.sessions:
                raise already(f"Session '{session_id}' already exists")
            kept = complete(spec)
            resreq = Resources(kept.resreq.cpu, kept.resreq.memory, kept.resreq.gpu)
            session = Session(session_id, kept, resreq, next(self._order))
            self.sessions[session_id] = session
            self.settle()
            return session

    def open_session(self, session_id: str, spec: pb.SessionSpec | None) -> Session:
        with self.lock:
            session = self.sessions.get(session_id)
            if session is None:
                if spec is None:
                    raise not_found(f"Session {session_id} not found")
                return self.create_session(session_id, spec)
            if session.state != pb.Open:
                raise invalid(f"Session {session_id} is not open")
            if spec is not None:
                compare(session, complete(spec))
            return session

    def close_session(self, session_id: str) -> Session:
        with self.lock:
            if session_id not in self.sessions:
                raise not_found(f"session <{session_id}>")
            session = self.sessions[session_id]
            if session.counts[pb.Running] or self.faults.take("close_refused"):
                raise internal("Cannot close session with running tasks")
            session.state = pb.Closed
            session.completed_ms = now_ms()
            for task_id in sorted(session.pending):
                self._move(session.tasks[task_id], pb.Cancelled)
            self.settle()
            return session

    def delete_session(self, session_id: str) -> Session:
        with self.lock:
            if session_id not in self.sessions:
                raise not_found(f"session <{session_id}>")
            session = self.sessions[session_id]
            if session.state != pb.Closed:
                raise internal("Cannot delete open session")
            self._delete(session)
            return session

    def _delete(self, session: Session) -> None:
        del self.sessions[session.id]
        session.deleted = True
        for task in session.tasks.values():
            task.changed.notify_all()

    # Tasks

    def create_task(self, session_id: str, data: bytes | None) -> Task:
        with self.lock:
            if session_id not in self.sessions:
                raise not_found(f"Session {session_id} not found: No such file or directory")
            session = self.sessions[session_id]
            if session.state != pb.Open:
                raise invalid("Cannot create task in closed session")
            changed = threading.Condition(self.lock)
            task = Task(len(session.tasks) + 1, session, data, changed)
            session.tasks[task.id] = task
            session.pending.add(task.id)
            session.counts[pb.Pending] += 1
            self._note(task, "Task was created with state <Pending>")
            self.settle()
            return task

    def task(self, session_id: str, task_id: str) -> Task:
        with self.lock:
            if not task_id.isdecimal():
                raise invalid("invalid task id")
            found = self.session(session_id).tasks.get(int(task_id))
            if found is None:
                raise not_found(task_id)
            return found

    def take_task(self, executor: Executor) -> Task | None:
        """Mark the session's lowest pending task as Running; return the task."""
        with self.lock:
            session = executor.session
            if session.state != pb.Open or not session.pending:
                return None
            task = session.tasks[min(session.pending)]
            self._move(task, pb.Running)
            self._note(task, "Task state was updated to <Running>")
            task.attempts += 1
            executor.task = task
            return task

    def finish(self, executor: Executor, state: int, output: bytes | None, text: str) -> None:
        """Finish the executor's task. If a task ends several times, the first end counts."""
        with self.lock:
            if executor.gone:
                return
            task, executor.task = executor.task, None
            if task is None or task.state in TERMINAL:
                return
            task.output = output
            self._move(task, state)
            said = text if state == pb.Failed else f"Task was completed with state <{NAMES[state]}>"
            self._note(task, said)
            self.settle()

    def requeue(self, task: Task) -> None:
        with self.lock:
            if task.state == pb.Running:
                self._move(task, pb.Pending)

    def _move(self, task: Task, state: int) -> None:
        session = task.session
        session.counts[task.state] -= 1
        session.counts[state] += 1
        (session.pending.add if state == pb.Pending else session.pending.discard)(task.id)
        task.state = state
        task.shown_events = []
        if state in TERMINAL:
            task.completed_ms = now_ms()
        if state != pb.Pending:  # Flame does not tell watchers that a task was queued again.
            task.changed.notify_all()

    def _note(self, task: Task, text: str) -> None:
        task.events.append(Event(task.state, text, now_ms()))

    # Executors and nodes

    def bind_failed(self, executor: Executor, return_code: int, text: str) -> None:
        with self.lock:
            if executor.gone:
                return
            session = executor.session
            said = (
                f"Executor <{executor.id}> on node <{executor.node}> failed to bind session "
                f"with return_code <{return_code}>: {text}"
            )
            session.events.append(Event(BIND_FAILED, said, now_ms()))
            session.bind_failures += 1
            if session.bind_failures == RETRY_LIMIT:
                said = (
                    f"Session retry limit reached after {RETRY_LIMIT}/{RETRY_LIMIT} failed "
                    "attempts; new executor assignment is paused for this session; existing "
                    "executors are unchanged."
                )
                session.events.append(Event(RETRY_LIMIT_REACHED, said, now_ms()))

    def claim(self, executor: Executor) -> bool:
        """Bind an Idle executor to the session that needs one most; False if none does."""
        with self.lock:
            needy = scheduling.neediest(self, executor)
            if executor.gone or needy is None:
                return False
            executor.session = needy
            executor.state = pb.ExecutorBinding
            return True

    def drop(self, executor: Executor) -> None:
        with self.lock:
            executor.gone = True
            executor.state = pb.ExecutorReleased
            self.executors.pop(executor.id, None)
            self.settle()

    def forget_node(self, name: str) -> None:
        """Delete the executors of a node that is away too long. Requeue their tasks."""
        with self.lock:
            self.nodes[name].state = pb.NotReady
            for executor in [e for e in self.executors.values() if e.node == name]:
                task, executor.task = executor.task, None
                if task is not None:
                    self.requeue(task)
                self.drop(executor)

    def recover(self) -> None:
        """Recover the state after a restart of the session manager. Requeue tasks."""
        with self.lock:
            for session in self.sessions.values():
                for task in session.tasks.values():
                    self.requeue(task)
            self.online = True
            self.settle()
