"""Opens a session whose executors have the dependencies, or install them first.

The first session assumes that executors already have the dependencies. The first executor that
answers reports its packages and its Python versions. If the run needs other packages or another
Python version, the session is replaced by that of a second application, whose executors install
the dependencies. A Python version that the executors do not have is refused before that.
"""

from __future__ import annotations

import contextlib
import json
import platform
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import FleetError, FleetUnreachableError, RlflameError
from rlflame.fleet.base import FleetEvent, Observer
from rlflame.rollout.machine import describe_host
from rlflame.terminal_text import format_count

from . import bundle, object_cache
from .client import (
    BIND_FAILED,
    CANCELLED,
    FAILED,
    RUNNING,
    SESSION_PAUSED,
    SUCCEED,
    FlameClient,
    parse_bytes,
)
from .timed_call import ClusterCallError

PREFIX = "rlflame-"
_POLL_INTERVAL_S = 0.25
_REPORT_INTERVAL_S = 2.0
#: A longer wait is unusual, so the message then suggests cluster-check.
_LONG_WAIT_S = 20.0
_MAX_REFUSALS = 5


@dataclass(frozen=True)
class FlameSession:
    """An open session, and the first executor's description of itself."""

    session: Any
    greeting: dict[str, Any]
    upload_bytes: int


class SessionPausedError(FleetError):
    """The cluster no longer starts executors for a session."""


@dataclass
class SessionStarter:
    """Opens a session, and a second one if executors need to install packages."""

    client: FlameClient
    application: str
    #: Arguments of the `Service` on the executors.
    settings: dict[str, Any]
    runtime: RuntimeSettings
    observer: Observer
    stop_event: threading.Event = field(default_factory=threading.Event)
    end_event: threading.Event = field(default_factory=threading.Event)
    session: FlameSession | None = None
    _error: RlflameError | None = None
    #: Whether the executors of the latest session install a package first.
    _installs: bool = False

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="rlflame-start", daemon=True)

    def wait(self) -> FlameSession:
        """Wait for the session and return it; raise the error if none could be started."""
        self.end_event.wait()
        if self.session is None:
            raise self._error or _make_closed_error()
        return self.session

    def _run(self) -> None:
        try:
            self.session = self.start()
        except RlflameError as error:
            self._error = error
        except Exception as error:
            message = f"The fleet could not start: {error!r}."
            self._error = FleetError(message, "run it again with --debug to see the traceback")
        self.end_event.set()
        if self.session is not None:
            installation = "executors install packages" if self._installs else "nothing to install"
            text = f"flame: sent {self.session.upload_bytes / 1e3:.0f} kB to the cluster; "
            self.observer(FleetEvent("note", "", 0, text + installation))
        self._report_phase("")

    def _report_phase(self, text: str) -> None:
        self.observer(FleetEvent("phase", "", 0, text))

    def start(self) -> FlameSession:
        dependencies = self.runtime.flame.dependencies
        installs = dependencies != "prepared"
        try:
            session = self.start_session()
        except SessionPausedError:
            if not installs:
                raise
        else:
            python = self.runtime.flame.python_version
            is_right = python in (None, _get_minor(session.greeting["python"]))
            if dependencies == "auto":
                installs = any(
                    compare_packages(session.greeting["packages"], describe_host()["packages"])
                )
            if is_right and not installs:
                return _check_packages(session)
            check_python(python or _get_minor(platform.python_version()), session.greeting)
        self._report_phase(
            "the executors lack the required packages: installing them"
            if installs
            else f"starting executors with Python {self.runtime.flame.python_version}"
        )
        with contextlib.suppress(FleetError):  # the fleet closes all sessions at the end
            self.client.close_sessions([self.application])
        return _check_packages(self.start_session(is_second=True, installs=installs))

    def start_session(self, *, is_second: bool = False, installs: bool = False) -> FlameSession:
        """Register the application, open a session and wait for its first answer.

        The executors of the second session get the Python version of the settings.
        """
        self._installs = installs
        runtime, client = self.runtime, self.client
        name = f"{self.application}-i" if is_second else self.application
        package, url, environment = b"", None, {}
        if installs:
            requirements = bundle.list_dependencies(runtime.flame.extra_dependencies)
            package = bundle.make_package(name, requirements)
            url = object_cache.upload(f"{self.application}/pkg/{name}.tar.gz", package)
        if is_second:
            minor = _get_minor(platform.python_version())
            environment["FLAME_PYTHON_VERSION"] = runtime.flame.python_version or minor
        archive = bundle.make_archive(runtime.env_file)
        context = object_cache.put_value(
            f"{self.application}/shared", bundle.make_context(archive, self.settings)
        )
        if self.stop_event.is_set():
            raise _make_closed_error()
        client.register_application(name, runtime, url, environment)
        session = client.open_session(f"{name}-{uuid.uuid4().hex[:6]}", name, context, runtime)
        greeting = self._wait_for_greeting(session)
        return FlameSession(session, greeting, len(archive) + len(package))

    def _wait_for_greeting(self, session: Any) -> dict[str, Any]:
        """Wait until an executor answers; meanwhile, report why none has answered."""
        started_at = time.monotonic()
        refusals, waited_s, reported_s = 0, 0.0, 0.0
        task = self.client.send_request(session, "greet")
        while not self.stop_event.is_set():
            try:
                status = self.client.poll_task(session, task)
                if status.state == SUCCEED:
                    reference, content = self.client.fetch_result(session, status)
                    greeting = parse_greeting(content)
                    object_cache.delete(reference.key)
                    return greeting
                if status.state in (FAILED, CANCELLED):
                    refusals += 1
                    if refusals > _MAX_REFUSALS:
                        reason = status.message or "no reason given"
                        raise FleetError(
                            f"The first executor could not describe itself ({reason}).",
                            "rlflame cluster-check",
                        )
                    task = self.client.send_request(session, "greet")
                    continue
                failures = self._list_bind_failures(session.id)
                if waited_s - reported_s >= _REPORT_INTERVAL_S and status.state != RUNNING:
                    reported_s = waited_s
                    self._report_phase(self.format_situation(session.id, waited_s, failures))
            except ClusterCallError:
                pass  # retried until the deadline
            waited_s = time.monotonic() - started_at
            if waited_s > self.runtime.flame.start_deadline_s:
                raise self._make_timeout_error(session.id)
            self.stop_event.wait(_POLL_INTERVAL_S if waited_s > 1.0 else 0.02)
        raise _make_closed_error()

    def handle_stall(self, waited_s: float) -> None:
        """Report why no task is running; raise an error if no executor starts in time."""
        session_id = self.wait().session.id
        try:
            failures = self._list_bind_failures(session_id)
            if waited_s > self.runtime.flame.start_deadline_s:
                raise self._make_timeout_error(session_id)
            self._report_phase(self.format_situation(session_id, waited_s, failures))
        except ClusterCallError:
            return  # the attempts retry until the session manager comes back

    def _list_bind_failures(self, session_id: str) -> list[str]:
        """Return the reasons why executors failed to start.

        Raise SessionPausedError if Flame no longer starts executors.
        """
        events = self.client.call("get_session", session_id).events
        texts = [event.message for event in events if event.code == BIND_FAILED]
        if any(event.code == SESSION_PAUSED for event in events):
            raise SessionPausedError(
                f"No executor could start: {texts[-1] if texts else 'no reason given'}.",
                "see the executor's log under FLAME_HOME/logs; rlflame cluster-check",
            )
        return texts

    def format_situation(
        self, session_id: str, waited_s: float, failures: Sequence[str] = ()
    ) -> str:
        """Return one line that says why no executor has answered yet."""
        if failures:
            return f"an executor failed to start, trying again: {failures[-1][:200]}"
        executors = self.client.call("list_executors")
        counts = Counter(executor.status.session_id for executor in executors)
        number = counts.pop(session_id, 0)
        counts.pop("", None)
        if number:
            activity = "installing on" if self._installs else "starting"
            return f"{activity} {format_count(number, 'executor')}, {waited_s:.0f} s"
        if counts:
            holder, count = counts.most_common(1)[0]
            cause = (
                f": other sessions have {counts.total()} of {len(executors)} executors ({holder} "
                f"has {count}); rlflame cluster-check --clean removes dead runs"
            )
        elif not self._has_fitting_node():
            cause = ": no node is large enough for runtime.flame.cpu and runtime.flame.memory"
        else:
            cause = "; rlflame cluster-check shows why" if waited_s > _LONG_WAIT_S else ""
        return f"waiting for an executor, {waited_s:.0f} s{cause}"

    def _has_fitting_node(self) -> bool:
        """Return whether a node is large enough for an executor of the requested size."""
        cpu, memory = self.runtime.flame.cpu or 0, parse_bytes(self.runtime.flame.memory or "0")
        nodes = self.client.call("list_nodes")
        sizes = [node.status.capacity for node in nodes if node.status.state == 1]
        return not sizes or any(size.cpu >= cpu and size.memory >= memory for size in sizes)

    def _make_timeout_error(self, session_id: str) -> RlflameError:
        deadline_s = self.runtime.flame.start_deadline_s
        try:
            situation = self.format_situation(session_id, deadline_s)
        except FleetError as error:
            situation = error.message
        return FleetUnreachableError(
            f"No executor answered within {deadline_s:g} s ({situation}).",
            "rlflame cluster-check shows why; to wait longer: "
            "--set runtime.flame.start_deadline_s=900",
        )


def check_python(version: str, greeting: Mapping[str, Any]) -> None:
    """Raise FleetError if the executor that sent the greeting does not have this Python version."""
    versions = [str(item) for item in greeting.get("pythons") or ()]
    if version in versions:
        return
    raise FleetError(
        f"The executors on {greeting['host']} cannot run Python {version}, only "
        f"{' or '.join(versions) or greeting['python']}.",
        f"--set runtime.flame.python_version={(versions or [_get_minor(greeting['python'])])[-1]}, "
        "or build their image with this version, as RLFLAME_PYTHON does in compose/",
    )


def _get_minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def compare_packages(
    remote: Mapping[str, str], local: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the packages that `remote` lacks, and those whose versions differ."""
    names = [name for name in bundle.PIN_REQUIREMENTS if name in local]
    return (
        [name for name in names if name not in remote],
        [name for name in names if remote.get(name, local[name]) != local[name]],
    )


def format_versions(names: list[str], remote: Mapping[str, str], local: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {remote[name]} (here {local[name]})" for name in names)


def _check_packages(session: FlameSession) -> FlameSession:
    """Return the session; raise FleetError if its packages are not compatible."""
    local, remote = describe_host()["packages"], session.greeting["packages"]
    _, different = compare_packages(remote, local)
    major = [name for name in different if remote[name].split(".")[0] != local[name].split(".")[0]]
    missing = [name for name in ("numpy", "gymnasium") if name not in remote]
    if not major and not missing:
        return session
    problem = f"{format_versions(major, remote, local)}, a major version other than this machine's"
    problem = problem if major else f"no {' and no '.join(missing)}"
    raise FleetError(
        f"The executors on {session.greeting['host']} have {problem}.",
        "to install this machine's versions: --set runtime.flame.dependencies='\"install\"'",
    )


def parse_greeting(content: memoryview) -> dict[str, Any]:
    """Parse an executor's answer to `greet`, which is JSON."""
    greeting = None
    with contextlib.suppress(ValueError, RecursionError):
        greeting = json.loads(bytes(content))
    if not isinstance(greeting, dict) or not isinstance(greeting.get("packages"), dict):
        raise FleetError(
            "An executor's description of itself is not JSON with a list of packages.",
            "rlflame cluster-check",
        )
    return greeting


def _make_closed_error() -> FleetError:
    return FleetError("The fleet was closed before it started.")
