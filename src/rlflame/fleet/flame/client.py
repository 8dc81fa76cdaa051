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

from rlflame.errors import FleetUnreachable
from rlflame.fleet.base import Meter

from . import endpoint as flame_endpoint
from . import object_cache
from .endpoint import CACHE, MANAGER, Server
from .endpoint import configured as configured
from .object_cache import Reference
from .requests import supervised
from .timeouts import CALL_S, Unanswered, bounded, refused

_KNOCK_S = 3.0
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
class TaskNews:
    """Where a task stands, as the cluster tells it."""

    state: int
    output: bytes | None = None
    message: str = ""


class Cluster:
    """An open connection. Every call either returns or raises a FleetError in bounded time."""

    def __init__(self) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        self.source = configured()
        if self.source is None:
            raise flame_endpoint.unconfigured()
        try:
            from flamepy.core.types import FlameContext
        except ImportError as error:
            raise flame_endpoint.not_importable(error) from error
        try:
            context = FlameContext()
        except Exception as error:
            raise flame_endpoint.unreadable(error) from error
        self.endpoint = str(context.endpoint)
        self.cache_endpoint = str(context.cache_endpoint)
        self.template = str(context.runner.template)
        self._tls = context.tls
        self._ca_file = getattr(context.tls, "ca_file", None)
        flame_endpoint.check(MANAGER, self.endpoint)
        flame_endpoint.check(CACHE, self.cache_endpoint)
        self._connection: Any = None
        #: What tasks, their results and the weights weigh.
        self.meter = Meter()

    def open(self) -> Cluster:
        """Connect; raises FleetUnreachable with what to type."""
        self.knock(self.endpoint, MANAGER)
        self.knock(self.cache_endpoint, CACHE)
        try:
            self.connect()
            # A connection is made with whatever speaks HTTP/2; only an answer tells.
            bounded(lambda: list(self.connection.list_nodes()), _CONNECT_S, "nodes")
        except Unanswered as error:
            self.close()
            raise self._unreachable(
                f"Something listens at {self.endpoint}, but does not answer as a session manager.",
                self.endpoint,
                MANAGER,
                f"{self.tls_hint(self.endpoint)}; clients' port is 8080, not 8081; "
                "rlflame cluster-check; --local runs it here",
                error.message,
            ) from error
        return self

    def knock(self, endpoint: str, server: Server) -> None:
        """Find out fast whether anybody listens at all."""
        try:
            place = urlsplit(endpoint)
            host, port = place.hostname or "", place.port or server.port
            socket.create_connection((host, port), _KNOCK_S).close()
        except (OSError, ValueError) as error:  # a host that is no name is a ValueError
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise self._unreachable(
                f"Nobody answers at {endpoint}, the {server.what} ({why}).", endpoint, server
            ) from error

    def tls_hint(self, endpoint: str) -> str:
        """What to try where somebody listens but no connection comes about."""
        if not endpoint.startswith("https"):
            return "https:// if its TLS is on (FLAME_CA_FILE names the certificate)"
        wanted = flame_endpoint.authority(endpoint, self._ca_file)
        return f"{wanted}; http:// if its TLS is off" if wanted else "http:// if its TLS is off"

    def cache_hint(self) -> str:
        wanted = flame_endpoint.authority(self.cache_endpoint, self._ca_file)
        return f"{wanted}; rlflame cluster-check" if wanted else "rlflame cluster-check"

    def _unreachable(
        self, message: str, endpoint: str, server: Server, hint: str = "", detail: str = ""
    ) -> FleetUnreachable:
        source = flame_endpoint.source(server, endpoint)
        hint = hint or "rlflame cluster-check tells what is wrong; --local runs it here"
        if source != flame_endpoint.DEFAULT:
            return FleetUnreachable(f"{message} It is configured in {source}.", hint, detail)
        return FleetUnreachable(
            f"{message} It is {source}: {server.variable} is not set.",
            f"export {server.variable}={server.example}; {hint}",
            detail,
        )

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(Unanswered):
                bounded(connection.close, 5.0, "disconnect")

    @property
    def connection(self) -> Any:
        if self._connection is None:
            raise Unanswered("The connection to the cluster is closed.")
        return self._connection

    # Applications and sessions.

    def application(self, name: str) -> Any | None:
        return bounded(lambda: self.connection.get_application(name), CALL_S, "get application")

    def applications(self) -> list[Any]:
        return bounded(lambda: list(self.connection.list_applications()), CALL_S, "applications")

    def register(
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
        model = self.application(template)
        if model is None:
            raise FleetUnreachable(
                f"The cluster has no application {template} to model ours on.",
                "rlflame cluster-check; a session manager registers it when it starts",
            )
        attributes = ApplicationAttributes(
            image=model.image,
            command=model.command,
            description="rlflame",
            labels=model.labels,
            arguments=supervised(list(model.arguments or [])),
            environments={**(model.environments or {}), **environment},
            max_instances=model.max_instances,
            delay_release=delay_release_s,
            schema=model.schema,
            url=url,
            installer=model.installer,
        )
        bounded(lambda: self.connection.register_application(name, attributes), CALL_S, "register")

    def unregister(self, name: str) -> None:
        bounded(lambda: self.connection.unregister_application(name), CALL_S, "unregister")

    def open_session(
        self,
        session: str,
        application: str,
        context: Reference,
        *,
        least: int,
        most: int | None,
        cpu: int | None,
        memory_bytes: int | None,
    ) -> Any:
        """A session whose executors load the object behind `context`."""
        from flamepy.core import ObjectRef
        from flamepy.core.types import ResourceRequirement, SessionAttributes

        need = None
        if cpu is not None or memory_bytes is not None:
            need = ResourceRequirement(
                cpu=1 if cpu is None else cpu, memory=memory_bytes or 1 << 30, gpu=0
            )
        attributes = SessionAttributes(
            application=application,
            id=session,
            common_data=ObjectRef(context.endpoint, context.key, 0).encode(),
            min_instances=least,
            max_instances=most,
            resreq=need,
        )
        return bounded(
            lambda: self.connection.open_session(session, attributes), CALL_S, "open session"
        )

    def session(self, session: str) -> Any:
        return bounded(lambda: self.connection.get_session(session), CALL_S, "get session")

    def sessions(self) -> list[Any]:
        return bounded(lambda: list(self.connection.list_sessions()), CALL_S, "sessions")

    def close_session(self, session: str) -> None:
        bounded(lambda: self.connection.close_session(session), CALL_S, "close session")

    def nodes(self) -> list[Any]:
        return bounded(lambda: list(self.connection.list_nodes()), CALL_S, "nodes")

    def executors(self) -> list[Any]:
        return bounded(lambda: list(self.connection.list_executors()), CALL_S, "executors")

    # Tasks. The two that are called most have gRPC's own deadline; the watch has none, and is
    # called from threads of the fleet's own, which may wait.

    def create(self, session: Any, payload: bytes) -> str:
        self.meter.sent(len(payload))
        try:
            return str(session.create_task(payload).id)
        except Exception as error:
            raise refused(error, "create task") from error

    def watch(self, session: Any, task: str, opened: Callable[[Any], None]) -> Iterator[TaskNews]:
        """The task's changes as they come. Ends, without a word, where the stream does."""
        watcher = session.watch_task(task)
        opened(getattr(watcher, "_stream", None))
        for update in watcher:
            yield TaskNews(int(update.state), update.output)

    def ask(self, session: Any, task: str) -> TaskNews:
        """Where the task stands, with the text of its failure."""
        try:
            found = session.get_task(task)
        except ValueError:  # flamepy has no word for Cancelled
            return TaskNews(CANCELLED)
        except Exception as error:
            raise refused(error, "get task") from error
        texts = [event.message for event in found.events if event.code == FAILED]
        return TaskNews(int(found.state), found.output, texts[-1] if texts else "")

    def delete(self, prefix: str) -> None:
        """Objects, for whoever removes a run and all that it has."""
        object_cache.delete(prefix)

    # For those who look at a cluster rather than work on it.

    def connect(self) -> None:
        """The half of `open` that asks the session manager; the cache may be away."""
        import flamepy

        self.knock(self.endpoint, MANAGER)
        self._connection = bounded(
            lambda: flamepy.connect(self.endpoint, self._tls), _CONNECT_S, "connect"
        )
        _limit(self._connection)


def _limit(connection: Any) -> None:
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
