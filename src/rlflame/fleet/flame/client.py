"""A client for the configured Flame cluster. Every call has a timeout."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, FleetError, FleetUnreachableError
from rlflame.fleet.base import TrafficMeter

from . import object_cache
from .bundle import add_supervisor, make_request
from .cluster_config import (
    CACHE,
    MANAGER,
    START,
    TLS_FIX,
    FlameConnectError,
    FlameServer,
    check_endpoint,
    find_configuration,
    make_unconfigured_error,
    make_unreadable_error,
)
from .object_cache import Reference
from .timed_call import CALL_S, ClusterCallError, call_with_timeout, format_error, make_call_error

_PORT_CHECK_S, _NAME_LOOKUP_S, _CONNECT_S = 3.0, 10.0, 12.0
#: The numbers of flamepy's task states.
PENDING, RUNNING, SUCCEED, FAILED, CANCELLED = range(5)
FINAL_STATES = (SUCCEED, FAILED, CANCELLED)
#: The state of a session that is not closed.
OPEN = 0
EXECUTOR_STATES = (
    "Unknown", "Void", "Idle", "Binding", "Bound", "Unbinding", "Releasing", "Released",
)  # fmt: skip
#: Codes of session events: an executor failed to start, or Flame stopped starting executors.
BIND_FAILED, SESSION_PAUSED = 1001, 1002


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The state of a task on the cluster."""

    state: int
    output: bytes | None = None
    message: str = ""


class FlameClient:
    """A connection to the configured cluster. Every call has a timeout."""

    def __init__(self) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        self.source = find_configuration()
        if self.source is None:
            raise make_unconfigured_error()
        try:
            from flamepy.core.types import FlameContext
            from grpc import _common
        except ImportError as error:
            raise ConfigError(
                f"flamepy is not installed, or cannot be imported: {format_error(error)}.",
                "pip install 'flamepy>=0.6.0,<0.7'",
            ) from error
        # gRPC would wake every thread that waits for an executor ten times a second.
        _common.MAXIMUM_WAIT_TIMEOUT = 60.0
        try:
            context = FlameContext()
        except Exception as error:
            raise make_unreadable_error(error) from error
        self.endpoint = str(context.endpoint)
        self.cache_endpoint = str(context.cache_endpoint)
        self.template = str(context.runner.template)
        self._tls = context.tls
        check_endpoint(MANAGER, self.endpoint)
        check_endpoint(CACHE, self.cache_endpoint)
        self._connection: Any = None
        #: Counts the bytes of tasks, results and weights.
        self.meter = TrafficMeter()

    def open(self) -> FlameClient:
        """Connect to the cluster; raise FlameConnectError if a server does not answer."""
        self.check_port(MANAGER, self.endpoint)
        self.check_port(CACHE, self.cache_endpoint)
        self.connect()
        return self

    def check_port(self, server: FlameServer, endpoint: str) -> None:
        """Raise FlameConnectError unless a server listens at the address."""

        def open_socket() -> None:
            address = urlsplit(endpoint)
            target = address.hostname or "", address.port or server.port
            socket.create_connection(target, _PORT_CHECK_S).close()

        try:
            call_with_timeout(open_socket, _NAME_LOOKUP_S, "connect")
        except FleetError as error:
            reason = getattr(error.__cause__, "strerror", None) or error.__cause__ or error.message
            raise FlameConnectError(
                server,
                endpoint,
                f"The {server.role} does not answer at {endpoint} ({reason}).",
                f"start it; on this machine: {START}",
            ) from error

    def connect(self) -> float:
        """Connect to the session manager; return its response time in seconds."""
        import flamepy

        self.check_port(MANAGER, self.endpoint)
        try:
            connection = self._connection = call_with_timeout(
                lambda: flamepy.connect(self.endpoint, self._tls), _CONNECT_S, "connect"
            )
            # flamepy sets no deadlines. Running these calls in another thread would take too long.
            for name in ("CreateTask", "GetTask"):
                call = getattr(connection._frontend, name)
                setattr(connection._frontend, name, partial(call, timeout=CALL_S))
            # Any HTTP/2 server accepts the connection; only a session manager answers.
            started_at = time.perf_counter()
            call_with_timeout(connection.list_nodes, _CONNECT_S, "list nodes")
        except ClusterCallError as error:
            self.close()
            raise FlameConnectError(
                MANAGER,
                self.endpoint,
                f"The server at {self.endpoint} does not answer as a session manager.",
                f"{TLS_FIX}; the port for clients is 8080, not 8081; if it hangs, restart it",
                error.message,
            ) from error
        return time.perf_counter() - started_at

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(ClusterCallError):
                call_with_timeout(connection.close, 5.0, "disconnect")

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of flamepy's connection, with a timeout."""
        if self._connection is None:
            raise ClusterCallError("The connection to the cluster is closed.")
        call = partial(getattr(self._connection, method), *arguments)
        return call_with_timeout(call, CALL_S, method.replace("_", " "))

    def close_sessions(self, applications: Sequence[str]) -> None:
        for session in self.call("list_sessions"):
            if session.state == OPEN and session.application in applications:
                self.call("close_session", session.id)

    def register_application(
        self,
        name: str,
        runtime: RuntimeSettings,
        url: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Register a copy of the template under `name`.

        If `url` is set, executors install the package at this address.
        """
        from flamepy.core.types import ApplicationAttributes

        template = runtime.flame.template or self.template
        model = self.call("get_application", template)
        if model is None:
            raise FleetUnreachableError(
                f"The cluster has no application {template}, the template for runs.",
                "rlflame cluster-check; the session manager registers it when it starts",
            )
        fields = ("image", "command", "labels", "max_instances", "schema", "installer")
        attributes = ApplicationAttributes(
            **{field: getattr(model, field) for field in fields},
            description="rlflame",
            arguments=add_supervisor(list(model.arguments or [])),
            environments={**(model.environments or {}), **(environment or {})},
            delay_release=runtime.flame.delay_release_s,
            url=url,
        )
        self.call("register_application", name, attributes)

    def open_session(
        self, session_id: str, application: str, context: Reference, runtime: RuntimeSettings
    ) -> Any:
        """Open a session whose executors load the object at `context`."""
        from flamepy.core.types import ResourceRequirement, SessionAttributes

        resources = None
        if runtime.flame.cpu is not None or runtime.flame.memory:
            cpu = 1 if runtime.flame.cpu is None else runtime.flame.cpu
            memory = parse_bytes(runtime.flame.memory or "1g")
            resources = ResourceRequirement(cpu=cpu, memory=memory, gpu=0)
        attributes = SessionAttributes(
            application=application,
            id=session_id,
            common_data=context.as_argument().encode(),
            min_instances=runtime.flame.min_executors,
            max_instances=runtime.workers,
            resreq=resources,
        )
        return self.call("open_session", session_id, attributes)

    def create_task(self, session: Any, payload: bytes) -> str:
        """Create a task, and return its ID. The only timeout is gRPC's deadline."""
        self.meter.count_sent(len(payload))
        try:
            return str(session.create_task(payload).id)
        except Exception as error:
            raise make_call_error(error, "create task") from error

    def get_task_status(self, session: Any, task: str) -> TaskStatus:
        """Return the status of a task. The only timeout is gRPC's deadline."""
        try:
            task_state = session.get_task(task)
        except ValueError:  # flamepy does not know the state Cancelled
            return TaskStatus(CANCELLED)
        except Exception as error:
            raise make_call_error(error, "get task") from error
        texts = [event.message for event in task_state.events if event.code == FAILED]
        return TaskStatus(int(task_state.state), task_state.output, texts[-1] if texts else "")

    # The calls below run in another thread, because Ctrl-C during a gRPC call can leave the channel
    # unresponsive. The session could then not be closed.

    def send_request(self, session: Any, method: str, *arguments: Any) -> str:
        payload = make_request(method, *arguments)
        return call_with_timeout(lambda: self.create_task(session, payload), CALL_S, "create task")

    def poll_task(self, session: Any, task: str) -> TaskStatus:
        return call_with_timeout(lambda: self.get_task_status(session, task), CALL_S, "get task")

    def fetch_result(self, session: Any, status: TaskStatus) -> tuple[Reference, memoryview]:
        """Return the location and the bytes of a task's result.

        Only the configured cache is read.
        """
        if status.state != SUCCEED or status.output is None:
            raise FleetError(status.message or "its executor failed without a message")
        reference = object_cache.parse_reference(status.output, session)
        try:
            return reference, object_cache.get(reference.key)
        except KeyError as error:
            raise FleetError(
                f"The object cache at {self.cache_endpoint} does not have an answer that an "
                f"executor stored at {reference.endpoint}.",
                f"if {reference.endpoint} is the object cache of this cluster: "
                f"export FLAME_CACHE_ENDPOINT={reference.endpoint}",
            ) from error

    def wait_for_answer(
        self, session: Any, task: str, timeout_s: float, interval_s: float
    ) -> memoryview:
        """Wait for the result of a small task; raise FleetError on failure or timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.poll_task(session, task)
            if status.state in FINAL_STATES:
                return self.fetch_result(session, status)[1]
            if time.monotonic() > deadline:
                raise FleetError(f"No executor answered a small task within {timeout_s:g} s.")
            time.sleep(interval_s)


def parse_bytes(text: str) -> int:
    """Convert a size such as `512m` to bytes, with binary units as in Flame."""
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    return int(text.rstrip("kmgtKMGT")) * units.get(text[-1].lower(), 1)


def remove_run(
    client: FlameClient, run: str, timeout_s: float, stop_lease: Callable[[], None] = lambda: None
) -> str:
    """Remove a run from the cluster; return the last error or "".

    First, the sessions are closed, because they write objects. Then the objects are deleted. The
    applications are unregistered last, because cluster-check uses them to find the run. After an
    error, the sequence starts again until the timeout: a session cannot be closed while its tasks
    are running, and workers may take 2 s to notice that the run has ended.
    """
    # A run that installs packages or chooses the Python version has a second application.
    names = (run, f"{run}-i")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.close_sessions(names)
            stop_lease()
            for name in names:
                object_cache.delete(f"{name}/*")
            for application in client.call("list_applications"):
                if application.name in names:
                    client.call("unregister_application", application.name)
            return ""
        except FleetError as error:
            if time.monotonic() >= deadline:
                return error.message.rstrip(".")
        time.sleep(0.2)
