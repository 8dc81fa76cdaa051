"""Finds, opens and calls the configured Flame cluster. Every call ends in bounded time."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import FleetError, FleetUnreachableError
from rlflame.fleet.base import TrafficMeter

from . import object_cache
from .bundle import add_supervisor, make_request
from .cluster_config import (
    CACHE,
    MANAGER,
    FlameConnectError,
    FlameServer,
    check_endpoint,
    find_configuration,
    is_local,
    make_import_error,
    make_unconfigured_error,
    make_unreadable_error,
)
from .object_cache import Reference
from .timed_call import CALL_S, ClusterCallError, call_with_timeout, make_call_error

_PORT_CHECK_S, _NAME_LOOKUP_S, _CONNECT_S = 3.0, 10.0, 12.0
#: flamepy's task states on the wire.
PENDING, RUNNING, SUCCEED, FAILED, CANCELLED = range(5)
FINAL_STATES = (SUCCEED, FAILED, CANCELLED)
#: A session's states.
OPEN, CLOSED = range(2)
EXECUTOR_STATES = (
    "Unknown", "Void", "Idle", "Binding", "Bound", "Unbinding", "Releasing", "Released",
)  # fmt: skip
#: Session events that say why no executor comes: a failed attempt, and the last of them.
BIND_FAILED, SESSION_PAUSED = 1001, 1002


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The state of a task on the cluster."""

    state: int
    output: bytes | None = None
    message: str = ""


class FlameClient:
    """A connection. Every call either returns or raises a FleetError in bounded time."""

    def __init__(self) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        self.source = find_configuration()
        if self.source is None:
            raise make_unconfigured_error()
        try:
            from flamepy.core.types import FlameContext
        except ImportError as error:
            raise make_import_error(error) from error
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
        #: The bytes of tasks, their results and the weights.
        self.meter = TrafficMeter()

    def open(self) -> FlameClient:
        """Check both servers and connect; raises FlameConnectError with what to type."""
        self.check_port(MANAGER, self.endpoint)
        self.check_port(CACHE, self.cache_endpoint)
        self.connect()
        return self

    def check_port(self, server: FlameServer, endpoint: str) -> None:
        """Find out fast whether anything listens at all."""

        def open_socket() -> None:
            address = urlsplit(endpoint)
            target = address.hostname or "", address.port or server.port
            socket.create_connection(target, _PORT_CHECK_S).close()

        try:
            call_with_timeout(open_socket, _NAME_LOOKUP_S, "connect")
        except FleetError as error:
            cause = error.__cause__
            reason = (cause.strerror if isinstance(cause, OSError) else None) or cause
            start = f"start it: {server.start_command}" if is_local(endpoint) else "start it there"
            raise FlameConnectError(
                server,
                endpoint,
                f"Nobody answers at {endpoint}, the {server.role} ({reason or error.message}).",
                "rlflame cluster-check tells what is wrong; --local runs it here",
                (start, f"or lead to another: export {server.variable}={server.example}"),
            ) from error

    def connect(self) -> float:
        """Connect to the session manager; returns how many seconds its first answer took."""
        import flamepy

        self.check_port(MANAGER, self.endpoint)
        try:
            connection = self._connection = call_with_timeout(
                lambda: flamepy.connect(self.endpoint, self._tls), _CONNECT_S, "connect"
            )
            # flamepy sets no deadlines, and a thread to watch each of these calls would cost
            # more than the call.
            for name in ("CreateTask", "GetTask"):
                call = getattr(connection._frontend, name)
                setattr(connection._frontend, name, partial(call, timeout=CALL_S))
            # A connection is made with any HTTP/2 server; only an answer tells.
            started_at = time.perf_counter()
            call_with_timeout(connection.list_nodes, _CONNECT_S, "list nodes")
        except ClusterCallError as error:
            self.close()
            advice = f"{self.format_tls_hint(self.endpoint)}; clients' port is 8080, not 8081"
            raise FlameConnectError(
                MANAGER,
                self.endpoint,
                f"Something listens at {self.endpoint}, but does not answer as a session manager.",
                f"{advice}; rlflame cluster-check; --local runs it here",
                (f"try {advice}", "if it hangs, restart it"),
                error.message,
            ) from error
        return time.perf_counter() - started_at

    def format_tls_hint(self, endpoint: str) -> str:
        """What to try where a server listens but no connection comes about."""
        if not endpoint.startswith("https"):
            return "https:// if its TLS is on (FLAME_CA_FILE names the certificate)"
        return "; ".join([*self._list_authority_hints(endpoint), "http:// if its TLS is off"])

    def format_cache_hint(self) -> str:
        hints = self._list_authority_hints(self.cache_endpoint)
        return "; ".join([*hints, "rlflame cluster-check"])

    def _list_authority_hints(self, endpoint: str) -> list[str]:
        """For an encrypted address that is tried with the system's authorities alone."""
        is_encrypted = urlsplit(endpoint).scheme in ("https", "grpcs", "grpc+tls")
        if not is_encrypted or getattr(self._tls, "ca_file", None):
            return []
        return ["export FLAME_CA_FILE=ca.crt, if the cluster has its own certificate authority"]

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(ClusterCallError):
                call_with_timeout(connection.close, 5.0, "disconnect")

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of flamepy's connection."""
        if self._connection is None:
            raise ClusterCallError("The connection to the cluster is closed.")
        call = partial(getattr(self._connection, method), *arguments)
        return call_with_timeout(call, CALL_S, method.replace("_", " "))

    def list_nodes(self) -> list[Any]:
        return list(self._call("list_nodes"))

    def list_executors(self) -> list[Any]:
        return list(self._call("list_executors"))

    def list_applications(self) -> list[Any]:
        return list(self._call("list_applications"))

    def list_sessions(self) -> list[Any]:
        return list(self._call("list_sessions"))

    def get_application(self, name: str) -> Any:
        """The application, or None."""
        return self._call("get_application", name)

    def get_session(self, session_id: str) -> Any:
        return self._call("get_session", session_id)

    def close_session(self, session_id: str) -> None:
        self._call("close_session", session_id)

    def unregister_application(self, name: str) -> None:
        self._call("unregister_application", name)

    def delete_objects(self, prefix: str) -> None:
        object_cache.delete(prefix)

    def register_application(
        self,
        name: str,
        runtime: RuntimeSettings,
        url: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """An application like the template, with the package at `url` to install or without."""
        from flamepy.core.types import ApplicationAttributes

        template = runtime.flame.template or self.template
        model = self.get_application(template)
        if model is None:
            raise FleetUnreachableError(
                f"The cluster has no application {template} to model ours on.",
                "rlflame cluster-check; a session manager registers it when it starts",
            )
        copied = ("image", "command", "labels", "max_instances", "schema", "installer")
        attributes = ApplicationAttributes(
            **{field: getattr(model, field) for field in copied},
            description="rlflame",
            arguments=add_supervisor(list(model.arguments or [])),
            environments={**(model.environments or {}), **(environment or {})},
            delay_release=runtime.flame.delay_release_s,
            url=url,
        )
        self._call("register_application", name, attributes)

    def open_session(
        self, session_id: str, application: str, context: Reference, runtime: RuntimeSettings
    ) -> Any:
        """A session whose executors load the object behind `context`."""
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
        return self._call("open_session", session_id, attributes)

    def create_task(self, session: Any, payload: bytes) -> str:
        """Bounded by gRPC's deadline alone: the main thread calls `send_request` instead."""
        self.meter.count_sent(len(payload))
        try:
            return str(session.create_task(payload).id)
        except Exception as error:
            raise make_call_error(error, "create task") from error

    def watch_task(
        self, session: Any, task: str, on_open: Callable[[Any], None]
    ) -> Iterator[TaskStatus]:
        """The task's changes as they come, without a deadline. Ends silently with the stream."""
        watcher = session.watch_task(task)
        on_open(getattr(watcher, "_stream", None))
        for update in watcher:
            yield TaskStatus(int(update.state), update.output)

    def get_task_status(self, session: Any, task: str) -> TaskStatus:
        """The state of the task, with the text of its failure; bounded by gRPC's deadline."""
        try:
            task_state = session.get_task(task)
        except ValueError:  # flamepy has no word for Cancelled
            return TaskStatus(CANCELLED)
        except Exception as error:
            raise make_call_error(error, "get task") from error
        texts = [event.message for event in task_state.events if event.code == FAILED]
        return TaskStatus(int(task_state.state), task_state.output, texts[-1] if texts else "")

    # In another thread, because Ctrl-C in the middle of a call of gRPC may leave its channel
    # without answers, and then nothing that was opened could be closed.

    def send_request(self, session: Any, method: str, *arguments: Any) -> str:
        payload = make_request(method, *arguments)
        return call_with_timeout(lambda: self.create_task(session, payload), CALL_S, "create task")

    def poll_task(self, session: Any, task: str) -> TaskStatus:
        return call_with_timeout(lambda: self.get_task_status(session, task), CALL_S, "get task")

    def fetch_result(self, session: Any, status: TaskStatus) -> tuple[Reference, memoryview]:
        """A task's result, from the configured cache only."""
        if status.state != SUCCEED or status.output is None:
            raise FleetError(status.message or "its executor failed without a word")
        reference = object_cache.parse_reference(status.output, session)
        try:
            return reference, object_cache.get(reference.key)
        except KeyError as error:
            raise FleetError(
                f"The object cache at {self.cache_endpoint} does not have an executor's answer, "
                f"which was put into {reference.endpoint}.",
                "if that is the object cache of this cluster: "
                f"export FLAME_CACHE_ENDPOINT={reference.endpoint}",
            ) from error


def parse_bytes(text: str) -> int:
    """`512m` in bytes, with binary units as in Flame."""
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    return int(text.rstrip("kmgtKMGT")) * units.get(text[-1].lower(), 1)


def close_quietly(stream: Any) -> None:
    """End a watch from outside; its reader then sees an error, and polls instead."""
    cancel = getattr(stream, "cancel", None)
    if cancel is not None:
        cancel()


def remove_run(
    client: FlameClient,
    run: str,
    applications: Sequence[str],
    sessions: Sequence[str],
    *,
    timeout_s: float,
    stop_lease: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Close sessions, delete objects and unregister applications; the first reason for a failure.

    Objects go after the sessions that write them, and before the applications by which
    cluster-check finds the run again. A run that installs has the name `run`-i, too. A refused
    step is repeated: a session with running tasks cannot be closed, and workers look at the lease
    every other second.
    """

    def has_session(session_id: str) -> bool:
        return any(s.id == session_id and s.state == OPEN for s in client.list_sessions())

    def has_application(name: str) -> bool:
        return client.get_application(name) is not None

    def delete(prefix: str) -> None:
        try:
            client.delete_objects(prefix)
        except FleetError as error:
            raise FleetError(
                f"the object cache does not delete its objects ({error.message}); its "
                "applications stay registered, so that cluster-check finds them"
            ) from error

    steps: list[tuple[Callable[[], None], Callable[[], bool]]] = [
        *((partial(client.close_session, s), partial(has_session, s)) for s in sessions),
        (stop_lease, lambda: False),
        (partial(delete, f"{run}/*"), lambda: True),
        (partial(delete, f"{run}-i/*"), lambda: True),
        *(
            (partial(client.unregister_application, name), partial(has_application, name))
            for name in applications
        ),
    ]
    deadline_s = clock() + timeout_s
    for step, is_needed in steps:
        while True:
            try:
                step()
                break
            except FleetError as error:
                with contextlib.suppress(FleetError):
                    if not is_needed():
                        break
                if clock() >= deadline_s:
                    return error.message.rstrip(".")
            sleep(0.2)
    return ""
