"""A connection to one Flame cluster: flamepy's public calls, bounded in time, in our words.

What lies in the object cache is `objects`. Must not know: retries, slots.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rlflame.errors import FleetUnreachableError
from rlflame.fleet.base import TrafficMeter

from . import endpoint as flame_endpoint
from . import object_cache
from .endpoint import CACHE, MANAGER, FlameServer
from .endpoint import find_configuration as find_configuration
from .object_cache import Reference
from .requests import add_supervisor
from .timed_call import CALL_S, ClusterCallError, call_with_timeout, make_call_error

_PORT_CHECK_S = 3.0
_CONNECT_S = 12.0
#: What flamepy's states are called on the wire.
PENDING, RUNNING, SUCCEED, FAILED, CANCELLED = range(5)
#: The other state of a session than open.
CLOSED = 1
EXECUTOR_STATES = (
    "Unknown", "Void", "Idle", "Binding", "Bound", "Unbinding", "Releasing", "Released",
)  # fmt: skip
#: Session events that say why no executor comes: a failed attempt, and the last of them.
BIND_FAILED, SESSION_PAUSED = 1001, 1002


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """Where a task stands, as the cluster tells it."""

    state: int
    output: bytes | None = None
    message: str = ""


class FlameClient:
    """An open connection. Every call either returns or raises a FleetError in bounded time."""

    def __init__(self) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        self.source = find_configuration()
        if self.source is None:
            raise flame_endpoint.make_unconfigured_error()
        try:
            from flamepy.core.types import FlameContext
        except ImportError as error:
            raise flame_endpoint.make_import_error(error) from error
        try:
            context = FlameContext()
        except Exception as error:
            raise flame_endpoint.make_unreadable_error(error) from error
        self.endpoint = str(context.endpoint)
        self.cache_endpoint = str(context.cache_endpoint)
        self.template = str(context.runner.template)
        self._tls = context.tls
        self._ca_file = getattr(context.tls, "ca_file", None)
        flame_endpoint.check_endpoint(MANAGER, self.endpoint)
        flame_endpoint.check_endpoint(CACHE, self.cache_endpoint)
        self._connection: Any = None
        #: What tasks, their results and the weights weigh.
        self.meter = TrafficMeter()

    def open(self) -> FlameClient:
        """Connect; raises FleetUnreachable with what to type."""
        self.check_port(self.endpoint, MANAGER)
        self.check_port(self.cache_endpoint, CACHE)
        try:
            self.connect()
            # A connection is made with whatever speaks HTTP/2; only an answer tells.
            call_with_timeout(lambda: list(self.connection.list_nodes()), _CONNECT_S, "nodes")
        except ClusterCallError as error:
            self.close()
            raise self._make_unreachable_error(
                f"Something listens at {self.endpoint}, but does not answer as a session manager.",
                self.endpoint,
                MANAGER,
                f"{self.format_tls_hint(self.endpoint)}; clients' port is 8080, not 8081; "
                "rlflame cluster-check; --local runs it here",
                error.message,
            ) from error
        return self

    def check_port(self, endpoint: str, server: FlameServer) -> None:
        """Find out fast whether anybody listens at all."""
        try:
            address = urlsplit(endpoint)
            host, port = address.hostname or "", address.port or server.port
            socket.create_connection((host, port), _PORT_CHECK_S).close()
        except (OSError, ValueError) as error:  # a host that is no name is a ValueError
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise self._make_unreachable_error(
                f"Nobody answers at {endpoint}, the {server.role} ({reason}).", endpoint, server
            ) from error

    def format_tls_hint(self, endpoint: str) -> str:
        """What to try where somebody listens but no connection comes about."""
        if not endpoint.startswith("https"):
            return "https:// if its TLS is on (FLAME_CA_FILE names the certificate)"
        authority_hint = flame_endpoint.format_authority_hint(endpoint, self._ca_file)
        return (
            f"{authority_hint}; http:// if its TLS is off"
            if authority_hint
            else "http:// if its TLS is off"
        )

    def format_cache_hint(self) -> str:
        authority_hint = flame_endpoint.format_authority_hint(self.cache_endpoint, self._ca_file)
        return (
            f"{authority_hint}; rlflame cluster-check"
            if authority_hint
            else "rlflame cluster-check"
        )

    def _make_unreachable_error(
        self, message: str, endpoint: str, server: FlameServer, hint: str = "", detail: str = ""
    ) -> FleetUnreachableError:
        source = flame_endpoint.find_source(server, endpoint)
        hint = hint or "rlflame cluster-check tells what is wrong; --local runs it here"
        if source != flame_endpoint.DEFAULT:
            return FleetUnreachableError(f"{message} It is configured in {source}.", hint, detail)
        return FleetUnreachableError(
            f"{message} It is {source}: {server.variable} is not set.",
            f"export {server.variable}={server.example}; {hint}",
            detail,
        )

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(ClusterCallError):
                call_with_timeout(connection.close, 5.0, "disconnect")

    @property
    def connection(self) -> Any:
        if self._connection is None:
            raise ClusterCallError("The connection to the cluster is closed.")
        return self._connection

    # Applications and sessions.

    def get_application(self, name: str) -> Any | None:
        return call_with_timeout(
            lambda: self.connection.get_application(name), CALL_S, "get application"
        )

    def list_applications(self) -> list[Any]:
        return call_with_timeout(
            lambda: list(self.connection.list_applications()), CALL_S, "applications"
        )

    def register_application(
        self,
        name: str,
        *,
        url: str | None,
        environment: dict[str, str],
        delay_release_s: int,
        template: str | None = None,
    ) -> None:
        """An application like the template's, with or without a package to install."""
        from flamepy.core.types import ApplicationAttributes

        template = template or self.template
        model = self.get_application(template)
        if model is None:
            raise FleetUnreachableError(
                f"The cluster has no application {template} to model ours on.",
                "rlflame cluster-check; a session manager registers it when it starts",
            )
        attributes = ApplicationAttributes(
            image=model.image,
            command=model.command,
            description="rlflame",
            labels=model.labels,
            arguments=add_supervisor(list(model.arguments or [])),
            environments={**(model.environments or {}), **environment},
            max_instances=model.max_instances,
            delay_release=delay_release_s,
            schema=model.schema,
            url=url,
            installer=model.installer,
        )
        call_with_timeout(
            lambda: self.connection.register_application(name, attributes), CALL_S, "register"
        )

    def unregister_application(self, name: str) -> None:
        call_with_timeout(
            lambda: self.connection.unregister_application(name), CALL_S, "unregister"
        )

    def open_session(
        self,
        session: str,
        application: str,
        context: Reference,
        *,
        min_executors: int,
        max_executors: int | None,
        cpu: int | None,
        memory_bytes: int | None,
    ) -> Any:
        """A session whose executors load the object behind `context`."""
        from flamepy.core import ObjectRef
        from flamepy.core.types import ResourceRequirement, SessionAttributes

        resources = None
        if cpu is not None or memory_bytes is not None:
            resources = ResourceRequirement(
                cpu=1 if cpu is None else cpu, memory=memory_bytes or 1 << 30, gpu=0
            )
        attributes = SessionAttributes(
            application=application,
            id=session,
            common_data=ObjectRef(context.endpoint, context.key, 0).encode(),
            min_instances=min_executors,
            max_instances=max_executors,
            resreq=resources,
        )
        return call_with_timeout(
            lambda: self.connection.open_session(session, attributes), CALL_S, "open session"
        )

    def get_session(self, session: str) -> Any:
        return call_with_timeout(
            lambda: self.connection.get_session(session), CALL_S, "get session"
        )

    def list_sessions(self) -> list[Any]:
        return call_with_timeout(lambda: list(self.connection.list_sessions()), CALL_S, "sessions")

    def close_session(self, session: str) -> None:
        call_with_timeout(lambda: self.connection.close_session(session), CALL_S, "close session")

    def list_nodes(self) -> list[Any]:
        return call_with_timeout(lambda: list(self.connection.list_nodes()), CALL_S, "nodes")

    def list_executors(self) -> list[Any]:
        return call_with_timeout(
            lambda: list(self.connection.list_executors()), CALL_S, "executors"
        )

    # Tasks. The two that are called most have gRPC's own deadline; the watch has none, and is
    # called from threads of the fleet's own, which may wait.

    def create_task(self, session: Any, payload: bytes) -> str:
        self.meter.count_sent(len(payload))
        try:
            return str(session.create_task(payload).id)
        except Exception as error:
            raise make_call_error(error, "create task") from error

    def watch_task(
        self, session: Any, task: str, on_open: Callable[[Any], None]
    ) -> Iterator[TaskStatus]:
        """The task's changes as they come. Ends, without a word, where the stream does."""
        watcher = session.watch_task(task)
        on_open(getattr(watcher, "_stream", None))
        for update in watcher:
            yield TaskStatus(int(update.state), update.output)

    def get_task_status(self, session: Any, task: str) -> TaskStatus:
        """Where the task stands, with the text of its failure."""
        try:
            task_state = session.get_task(task)
        except ValueError:  # flamepy has no word for Cancelled
            return TaskStatus(CANCELLED)
        except Exception as error:
            raise make_call_error(error, "get task") from error
        texts = [event.message for event in task_state.events if event.code == FAILED]
        return TaskStatus(int(task_state.state), task_state.output, texts[-1] if texts else "")

    def delete_objects(self, prefix: str) -> None:
        """Objects, for whoever removes a run and all that it has."""
        object_cache.delete(prefix)

    # For those who look at a cluster rather than work on it.

    def connect(self) -> None:
        """The half of `open` that asks the session manager; the cache may be away."""
        import flamepy

        self.check_port(self.endpoint, MANAGER)
        self._connection = call_with_timeout(
            lambda: flamepy.connect(self.endpoint, self._tls), _CONNECT_S, "connect"
        )
        _set_call_timeouts(self._connection)


def _set_call_timeouts(connection: Any) -> None:
    """Give every call of a connection a deadline: flamepy sets none, and a thread for each call
    that watches over it would cost more than the call."""
    frontend = connection._frontend
    for name in ("CreateTask", "GetTask"):
        setattr(frontend, name, partial(getattr(frontend, name), timeout=CALL_S))


def close_quietly(stream: Any) -> None:
    """End a watch from outside; its reader then sees an error, and asks instead."""
    cancel = getattr(stream, "cancel", None)
    if cancel is not None:
        cancel()
