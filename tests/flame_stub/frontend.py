"""The session manager's gRPC frontend: translates messages to the state and back.

This module does not know executors' threads, worker processes or the object cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from flamepy.proto import frontend_pb2 as fe
from flamepy.proto import types_pb2 as pb
from flamepy.proto.frontend_pb2_grpc import FrontendServicer, add_FrontendServicer_to_server

from flame_stub.records import TERMINAL, Node, Resources, Session
from flame_stub.rules import Refused, check_name, internal, not_found
from flame_stub.state import State

#: The largest message that Flame's server decodes.
LIMIT_BYTES = 4 * 1024 * 1024
#: The number of threads. Each open watch needs one.
THREADS = 300
#: The time for the server to answer its own call on a busy machine.
PATIENCE_S = 60


def answer(method: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse large messages, and translate a refusal to a gRPC status."""

    def guarded(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        size = request.ByteSize()
        if size > LIMIT_BYTES:
            text = f"decoded message length too large: found {size} bytes"
            text = f"Error, {text}, the limit is: {LIMIT_BYTES} bytes"
            context.abort(grpc.StatusCode.OUT_OF_RANGE, text)
        try:
            return method(self, request, context)
        except Refused as refused:
            context.abort(refused.code, refused.text)

    return guarded


def in_band(method: Callable[..., None]) -> Callable[..., Any]:
    """The register calls return errors in their result and not as a status."""

    def guarded(self: Any, request: Any, context: grpc.ServicerContext) -> pb.Result:
        try:
            method(self, request)
        except Refused as refused:
            return pb.Result(return_code=-1, message=refused.text)
        return pb.Result(return_code=0)

    return guarded


class Servicer(FrontendServicer):
    """All calls of the frontend. When `epoch` changes, all open streams break."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.epoch = threading.Event()
        self.open_watches = 0

    @in_band
    def RegisterApplication(self, request: Any) -> None:
        check_name(request.name)
        self._state.register(request.name, request.application)

    @in_band
    def UnregisterApplication(self, request: Any) -> None:
        self._state.unregister(request.name)

    @in_band
    def UpdateApplication(self, request: Any) -> None:
        check_name(request.name)
        self._state.update(request.name, request.application)

    @answer
    def GetApplication(self, request: Any, context: Any) -> pb.Application:
        return self._state.application(request.name).message()

    @answer
    def ListApplication(self, request: Any, context: Any) -> pb.ApplicationList:
        with self._state.lock:
            hidden = {"flmrun"} if self._state.faults.flmrun_missing else set()
            found = [a for a in self._state.applications.values() if a.name not in hidden]
            return pb.ApplicationList(applications=[a.message() for a in found])

    @answer
    def ListExecutor(self, request: Any, context: Any) -> pb.ExecutorList:
        with self._state.lock:
            return pb.ExecutorList(executors=[e.message() for e in self._state.executors.values()])

    @answer
    def ListNodes(self, request: Any, context: Any) -> pb.NodeList:
        with self._state.lock:
            return pb.NodeList(nodes=[node.message() for node in self._nodes()])

    @answer
    def GetNode(self, request: Any, context: Any) -> fe.GetNodeResponse:
        with self._state.lock:
            for node in self._nodes():
                if node.name == request.name:
                    return fe.GetNodeResponse(node=node.message())
        raise not_found(f"node <{request.name}> not found")

    def _nodes(self) -> list[Node]:
        ghost = self._state.faults.ghost_node
        known = list(self._state.nodes.values())
        capacity = known[0].capacity if known else Resources()
        return known + ([Node(ghost, capacity, pb.NotReady)] if ghost else [])

    @answer
    def CreateSession(self, request: Any, context: Any) -> pb.Session:
        return self._state.create_session(request.session_id, request.session).message()

    @answer
    def OpenSession(self, request: Any, context: Any) -> pb.Session:
        spec = request.session if request.HasField("session") else None
        with self._state.lock:
            return self._state.open_session(request.session_id, spec).message()

    @answer
    def CloseSession(self, request: Any, context: Any) -> pb.Session:
        with self._state.lock:
            return self._state.close_session(request.session_id).message()

    @answer
    def DeleteSession(self, request: Any, context: Any) -> pb.Session:
        return self._state.delete_session(request.session_id).message()

    @answer
    def GetSession(self, request: Any, context: Any) -> pb.Session:
        with self._state.lock:
            return self._shown(self._state.session(request.session_id))

    @answer
    def ListSession(self, request: Any, context: Any) -> pb.SessionList:
        with self._state.lock:
            return pb.SessionList(sessions=map(self._shown, self._state.sessions.values()))

    def _shown(self, session: Session) -> pb.Session:
        return session.message(with_events=True)

    @answer
    def CreateTask(self, request: Any, context: Any) -> pb.Task:
        spec = request.task
        with self._state.lock:
            data = spec.input if spec.HasField("input") else None
            return self._state.create_task(spec.session_id, data).message()

    @answer
    def GetTask(self, request: Any, context: Any) -> pb.Task:
        if self._state.faults.take("get_task_errors"):
            raise internal("failed on demand")
        with self._state.lock:
            task = self._state.task(request.session_id, request.task_id)
            task.shown_events = list(task.events)
            return task.message()

    def ListTask(self, request: Any, context: Any) -> Iterator[pb.Task]:
        with self._state.lock:
            session = self._state.sessions.get(request.session_id)
            messages = [task.message() for task in session.tasks.values()] if session else []
        if session is None:
            context.abort(grpc.StatusCode.NOT_FOUND, request.session_id)
        yield from messages

    def WatchTask(self, request: Any, context: Any) -> Iterator[pb.Task]:
        self._count(1)
        try:
            yield from self._watch(request, context)
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._state.lock:
            self.open_watches += more

    def _watch(self, request: Any, context: Any) -> Iterator[pb.Task]:
        """Stream all changes, with the initial state only if it is final. End normally."""
        if self._state.faults.take("watch_empty"):
            return
        cut = self._state.faults.take("watch_ends")
        try:
            task = self._state.task(request.session_id, request.task_id)
        except Refused:
            return
        epoch = self.epoch

        def wake() -> None:
            with self._state.lock:
                task.changed.notify_all()

        context.add_callback(wake)
        seen = task.state
        while True:
            with self._state.lock:
                while not (
                    epoch.is_set()
                    or not context.is_active()
                    or task.session.deleted
                    or task.state in TERMINAL
                    or task.state not in (seen, pb.Pending)
                ):
                    task.changed.wait()
                broken = epoch.is_set()
                ended = not context.is_active() or task.session.deleted
                message, seen = task.message(), task.state
            if broken:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Stream removed")
            if ended or (cut and seen in TERMINAL):
                return
            yield message
            if cut or seen in TERMINAL:
                return


class Frontend:
    """The server with its servicer. It can stop and start again at the same address."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.port = 0
        self.start()

    @property
    def open_watches(self) -> int:
        return self._servicer.open_watches

    def start(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="flame-frontend")
        self._servicer = Servicer(self._state)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._server = grpc.server(self._pool, options=options)
        add_FrontendServicer_to_server(self._servicer, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """Break all streams and stop answering, without remaining threads."""
        self._servicer.epoch.set()
        with self._state.lock:
            for session in self._state.sessions.values():
                for task in session.tasks.values():
                    task.changed.notify_all()
        self._server.stop(grace=1.0).wait()
        self._pool.shutdown()
