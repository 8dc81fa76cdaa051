"""How an application comes to answer on a cluster: prepared executors, or a package to install.

Prepared executors need no index and no installing, so they are asked first: a session without a
package says what they have. Where that is not what this machine has, a second application with a
package of dependencies takes its place. Must not know: tasks, fragments, weights.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from rlflame.errors import FleetError, FleetUnreachableError, RlflameError
from rlflame.rollout.machine import describe_host

from . import bundle, object_cache
from .client import (
    BIND_FAILED,
    CANCELLED,
    FAILED,
    RUNNING,
    SESSION_PAUSED,
    SUCCEED,
    FlameClient,
    TaskStatus,
)
from .executor_bootstrap import Loader
from .object_cache import Reference
from .requests import make_request, parse_greeting
from .timed_call import CALL_S, ClusterCallError, call_with_timeout

PREFIX = "rlflame-"
_POLL_INTERVAL_S = 0.25
_REPORT_INTERVAL_S = 2.0
#: A wait of so long is not usual.
_LONG_WAIT_S = 20.0
_MAX_REFUSALS = 5


@dataclass(frozen=True)
class FlameOptions:
    """What the user asked of the cluster."""

    max_executors: int | None = None
    min_executors: int = 0
    cpu: int | None = None
    memory_bytes: int | None = None
    python_version: str | None = None
    dependencies: Literal["auto", "prepared", "install"] = "auto"
    extra_dependencies: tuple[str, ...] = ()
    template: str | None = None
    env_file: str | None = None
    start_deadline_s: float = 300.0
    delay_release_s: int = 120


@dataclass
class FlameSession:
    """A session that answers."""

    application: str
    session_id: str
    session: Any
    greeting: dict[str, Any]
    installed: bool
    upload_bytes: int


@dataclass
class SessionStarter:
    """Opens sessions until one of them answers with what this machine has."""

    client: FlameClient
    application: str
    settings: dict[str, Any]
    options: FlameOptions
    report_phase: Callable[[str], None]
    is_stopped: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    #: Everything that was opened, for whoever cleans up.
    opened: list[tuple[str, str]] = field(default_factory=list)

    def start(self) -> FlameSession:
        dependencies = self.options.dependencies
        if dependencies == "install":
            return self._check_packages(self._start_session(installed=True))
        try:
            started = self._start_session(installed=False)
        except SessionPausedError:
            if dependencies == "prepared":
                raise
            started = None
        if started is not None and not self.find_missing_packages(started.greeting):
            return started
        if dependencies == "prepared":
            assert started is not None
            return self._check_packages(started)
        self.report_phase("the executors lack the right packages: installing them for this run")
        self._remove_last()
        return self._check_packages(self._start_session(installed=True))

    def ask_prepared(self) -> FlameSession:
        """What executors are as they stand, whether or not a run would do with that."""
        return self._start_session(installed=False)

    def find_missing_packages(self, executor_greeting: dict[str, Any]) -> list[str]:
        """Packages that environments are made of, and that are absent or different there."""
        local_packages, executor_packages = (
            describe_host()["packages"],
            executor_greeting["packages"],
        )
        return [
            f"{name} {executor_packages.get(name, 'absent')} (here {local_packages[name]})"
            for name in bundle.PINNED
            if name in local_packages and executor_packages.get(name) != local_packages[name]
        ]

    def _check_packages(self, started: FlameSession) -> FlameSession:
        """What the executors have may differ in a version, but not be absent."""
        local_packages, executor_packages = (
            describe_host()["packages"],
            started.greeting["packages"],
        )
        absent = [name for name in ("numpy", "gymnasium") if name not in executor_packages]
        incompatible = [
            f"{name} {executor_packages[name]} (here {local_packages[name]})"
            for name in bundle.PINNED
            if name in local_packages
            and name in executor_packages
            and _parse_major(local_packages[name]) != _parse_major(executor_packages[name])
        ]
        if incompatible:
            raise FleetError(
                f"The executors on {started.greeting['host']} have {', '.join(incompatible)}, "
                "too far from this machine's to trust the results.",
                "let them install what is here: --set runtime.flame.dependencies='\"install\"'",
            )
        if absent:
            raise FleetError(
                f"The executors on {started.greeting['host']} have no {' and no '.join(absent)}.",
                "let them install it: --set runtime.flame.dependencies='\"install\"'",
            )
        return started

    def _start_session(self, *, installed: bool) -> FlameSession:
        """Register, open, and wait for a first answer."""
        options, client = self.options, self.client
        name = f"{self.application}-i" if installed else self.application
        package, url, environment = b"", None, {}
        if installed:
            requirements = bundle.list_dependencies(options.extra_dependencies)
            package = bundle.make_package(name, requirements)
            url = object_cache.upload(f"{self.application}/pkg/{name}.tar.gz", package)
            minor = ".".join(platform.python_version_tuple()[:2])
            environment["FLAME_PYTHON_VERSION"] = options.python_version or minor
        elif options.python_version:
            environment["FLAME_PYTHON_VERSION"] = options.python_version
        archive = bundle.make_archive(options.env_file)
        loader_class = type(
            "RlflameWorker",
            (Loader,),
            {"__module__": Loader.__module__, "archive": archive, "settings": self.settings},
        )
        context = object_cache.put_context(f"{self.application}/shared", loader_class)
        session_id = f"{name}-{uuid.uuid4().hex[:6]}"
        # Before it is there: a call that was cut short may have come through.
        self.opened.append((name, session_id))
        if self.is_stopped():
            raise _make_closed_error()
        client.register_application(
            name,
            url=url,
            environment=environment,
            delay_release_s=options.delay_release_s,
            template=options.template,
        )
        session = self._open_session(session_id, name, context)
        executor_greeting = self._wait_for_greeting(session, session_id, installed=installed)
        return FlameSession(
            name, session_id, session, executor_greeting, installed, len(archive) + len(package)
        )

    def _open_session(self, session_id: str, name: str, context: Reference) -> Any:
        options = self.options
        return self.client.open_session(
            session_id,
            name,
            context,
            min_executors=options.min_executors,
            max_executors=options.max_executors,
            cpu=options.cpu,
            memory_bytes=options.memory_bytes,
        )

    def _remove_last(self) -> None:
        """Take back the application that did not answer well."""
        name, session_id = self.opened[-1]
        try:
            self.client.close_session(session_id)
            self.client.unregister_application(name)
        except FleetError:
            return  # it is tried again at the end
        self.opened.pop()

    def _create_greet_task(self, session: Any) -> str:
        """In another thread, as `call_with_timeout` does: Ctrl-C in the middle of a call of gRPC
        may leave its channel without answers, and what was opened could not be closed any more."""
        create = partial(self.client.create_task, session, make_request("greet"))
        return call_with_timeout(create, CALL_S, "create task")

    def _wait_for_greeting(
        self, session: Any, session_id: str, *, installed: bool
    ) -> dict[str, Any]:
        """Ask until an executor answers; say meanwhile what stands in the way."""
        started_at = reported_at = self.clock()
        refusals = 0
        task = self._create_greet_task(session)
        while not self.is_stopped():
            try:
                status = call_with_timeout(
                    partial(self.client.get_task_status, session, task), CALL_S, "get task"
                )
                if status.state == SUCCEED:
                    return self._read_greeting(session, status)
                if status.state in (FAILED, CANCELLED) and refusals < _MAX_REFUSALS:
                    refusals += 1
                    task = self._create_greet_task(session)
                    continue
                if status.state in (FAILED, CANCELLED):
                    raise FleetError(
                        "The first executor could not say what it is "
                        f"({status.message or 'no reason given'}).",
                        "rlflame cluster-check",
                    )
                failures = self._find_bind_failures(session_id)
                now = self.clock()
                pause_s = _REPORT_INTERVAL_S if now - started_at < _LONG_WAIT_S else _LONG_WAIT_S
                if now - reported_at >= pause_s and status.state != RUNNING:
                    reported_at = now
                    self.report_phase(
                        self.format_situation(
                            session_id, now - started_at, failures, installed=installed
                        )
                    )
            except ClusterCallError:
                now = self.clock()
            if now - started_at > self.options.start_deadline_s:
                raise self._make_timeout_error(session_id, installed=installed)
            time.sleep(_POLL_INTERVAL_S if now - started_at > 1.0 else 0.02)
        raise _make_closed_error()

    def _read_greeting(self, session: Any, status: TaskStatus) -> dict[str, Any]:
        reference = object_cache.parse_reference(status.output or b"", session)
        try:
            content = object_cache.get(reference.key)
        except KeyError as error:
            raise FleetError(
                f"The object cache at {self.client.cache_endpoint} does not have the first "
                f"executor's answer, which was put into {reference.endpoint}.",
                "if that is the object cache of this cluster: "
                f"export FLAME_CACHE_ENDPOINT={reference.endpoint}",
            ) from error
        greeting = parse_greeting(content)
        object_cache.delete(reference.key)
        return greeting

    def handle_stall(self, started: FlameSession, waited_s: float) -> None:
        """Nothing runs in the middle of a run: say why, or raise what makes it hopeless."""
        failures = self._find_bind_failures(started.session_id)
        if waited_s > self.options.start_deadline_s:
            raise self._make_timeout_error(started.session_id, installed=started.installed)
        self.report_phase(
            self.format_situation(
                started.session_id, waited_s, failures, installed=started.installed
            )
        )

    def _find_bind_failures(self, session_id: str) -> list[str]:
        """What executors said that could not take the session up; raises once they gave up."""
        events = self.client.get_session(session_id).events
        texts = [event.message for event in events if event.code == BIND_FAILED]
        if any(event.code == SESSION_PAUSED for event in events):
            raise SessionPausedError(
                f"No executor could start: {texts[-1] if texts else 'no reason given'}.",
                "the executor's log is under FLAME_HOME/logs; rlflame cluster-check",
            )
        return texts

    def format_situation(
        self, session_id: str, waited_s: float, failures: list[str], *, installed: bool
    ) -> str:
        """One line for whoever waits for the first executor."""
        executors = self.client.list_executors()
        session_counts = Counter(executor.status.session_id for executor in executors)
        states = session_counts.pop(session_id, 0)
        session_counts.pop("", None)
        waited = f"{waited_s:.0f} s"
        if failures:
            return f"an executor failed to start, trying again: {failures[-1][:200]}"
        if not states and session_counts:
            holder, number = session_counts.most_common(1)[0]
            return (
                f"waiting for an executor, {waited}: other sessions have "
                f"{sum(session_counts.values())} of "
                f"{len(executors)}, {holder} alone {number}; rlflame cluster-check --clean removes "
                "those of dead runs"
            )
        if not states and not self._has_fitting_node():
            return (
                f"waiting for an executor, {waited}: no node is as large as runtime.flame.cpu and "
                "memory want one to be"
            )
        if not states:
            hint = "; rlflame cluster-check tells why" if waited_s > _LONG_WAIT_S else ""
            return f"waiting for an executor, {waited}{hint}"
        activity = "installing on" if installed else "starting"
        plural = "" if states == 1 else "s"
        return f"{activity} {states} executor{plural}, {waited}"

    def _has_fitting_node(self) -> bool:
        """Whether any node could hold an executor as it was asked for, were it empty."""
        cpus, memory_bytes = self.options.cpu or 0, self.options.memory_bytes or 0
        sizes = [
            node.status.capacity for node in self.client.list_nodes() if node.status.state == 1
        ]
        return not sizes or any(s.cpu >= cpus and s.memory >= memory_bytes for s in sizes)

    def _make_timeout_error(self, session_id: str, *, installed: bool) -> RlflameError:
        try:
            situation = self.format_situation(
                session_id, self.options.start_deadline_s, [], installed=installed
            )
        except FleetError as error:
            situation = error.message
        return FleetUnreachableError(
            f"No executor answered within {self.options.start_deadline_s:g} s ({situation}).",
            "rlflame cluster-check tells why; to wait longer: "
            "--set runtime.flame.start_deadline_s=900",
        )


def _make_closed_error() -> FleetError:
    return FleetError("The fleet was closed before it had started.")


def _parse_major(version: str) -> str:
    return version.split(".")[0]


class SessionPausedError(FleetError):
    """The cluster has given up starting executors for a session."""
