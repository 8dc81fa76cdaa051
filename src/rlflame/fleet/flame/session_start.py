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

from rlflame.errors import FleetError, FleetUnreachable, RlflameError
from rlflame.rollout.machine import greeting

from . import bundle, object_cache
from .client import (
    BIND_FAILED,
    CANCELLED,
    FAILED,
    RUNNING,
    SESSION_PAUSED,
    SUCCEED,
    Cluster,
    TaskNews,
)
from .loader import Loader
from .object_cache import Reference
from .requests import parse_greeting, request
from .timeouts import CALL_S, Unanswered, bounded

PREFIX = "rlflame-"
_LOOK_EVERY_S = 0.25
_TELL_EVERY_S = 2.0
#: A wait of so long is not usual.
_LONG_S = 20.0
_REFUSALS = 5


@dataclass(frozen=True)
class Wishes:
    """What the user asked of the cluster."""

    most: int | None = None
    least: int = 0
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
class Started:
    """A session that answers."""

    application: str
    session_id: str
    session: Any
    greeting: dict[str, Any]
    installed: bool
    upload_bytes: int


@dataclass
class Starter:
    """Opens sessions until one of them answers with what this machine has."""

    cluster: Cluster
    application: str
    settings: dict[str, Any]
    wishes: Wishes
    tell: Callable[[str], None]
    stopped: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    #: Everything that was opened, for whoever cleans up.
    opened: list[tuple[str, str]] = field(default_factory=list)

    def start(self) -> Started:
        wanted = self.wishes.dependencies
        if wanted == "install":
            return self._checked(self._try(installed=True))
        try:
            started = self._try(installed=False)
        except Paused:
            if wanted == "prepared":
                raise
            started = None
        if started is not None and not self.lacking(started.greeting):
            return started
        if wanted == "prepared":
            assert started is not None
            return self._checked(started)
        self.tell("the executors lack the right packages: installing them for this run")
        self._withdraw()
        return self._checked(self._try(installed=True))

    def ask_prepared(self) -> Started:
        """What executors are as they stand, whether or not a run would do with that."""
        return self._try(installed=False)

    def lacking(self, found: dict[str, Any]) -> list[str]:
        """Packages that environments are made of, and that are absent or different there."""
        here, there = greeting()["packages"], found["packages"]
        return [
            f"{name} {there.get(name, 'absent')} (here {here[name]})"
            for name in bundle.PINNED
            if name in here and there.get(name) != here[name]
        ]

    def _checked(self, started: Started) -> Started:
        """What the executors have may differ in a version, but not be absent."""
        here, there = greeting()["packages"], started.greeting["packages"]
        absent = [name for name in ("numpy", "gymnasium") if name not in there]
        apart = [
            f"{name} {there[name]} (here {here[name]})"
            for name in bundle.PINNED
            if name in here and name in there and _major(here[name]) != _major(there[name])
        ]
        if apart:
            raise FleetError(
                f"The executors on {started.greeting['host']} have {', '.join(apart)}, "
                "too far from this machine's to trust the results.",
                "let them install what is here: --set runtime.flame.dependencies='\"install\"'",
            )
        if absent:
            raise FleetError(
                f"The executors on {started.greeting['host']} have no {' and no '.join(absent)}.",
                "let them install it: --set runtime.flame.dependencies='\"install\"'",
            )
        return started

    def _try(self, *, installed: bool) -> Started:
        """Register, open, and wait for a first answer."""
        wishes, cluster = self.wishes, self.cluster
        name = f"{self.application}-i" if installed else self.application
        package, url, environment = b"", None, {}
        if installed:
            wanted = bundle.dependencies(wishes.extra_dependencies)
            package = bundle.package(name, wanted)
            url = object_cache.upload(f"{self.application}/pkg/{name}.tar.gz", package)
            minor = ".".join(platform.python_version_tuple()[:2])
            environment["FLAME_PYTHON_VERSION"] = wishes.python_version or minor
        elif wishes.python_version:
            environment["FLAME_PYTHON_VERSION"] = wishes.python_version
        code = bundle.archive(wishes.env_file)
        shipped = type(
            "RlflameWorker",
            (Loader,),
            {"__module__": Loader.__module__, "archive": code, "settings": self.settings},
        )
        carried = object_cache.put_context(f"{self.application}/shared", shipped)
        session_id = f"{name}-{uuid.uuid4().hex[:6]}"
        # Before it is there: a call that was cut short may have come through.
        self.opened.append((name, session_id))
        if self.stopped():
            raise _closed()
        cluster.register(
            name,
            url=url,
            environment=environment,
            delay_release_s=wishes.delay_release_s,
            template=wishes.template,
        )
        session = self._session(session_id, name, carried)
        found = self._first_answer(session, session_id, installed=installed)
        return Started(name, session_id, session, found, installed, len(code) + len(package))

    def _session(self, session_id: str, name: str, carried: Reference) -> Any:
        wishes = self.wishes
        return self.cluster.open_session(
            session_id,
            name,
            carried,
            least=wishes.least,
            most=wishes.most,
            cpu=wishes.cpu,
            memory_bytes=wishes.memory_bytes,
        )

    def _withdraw(self) -> None:
        """Take back the application that did not answer well."""
        name, session_id = self.opened[-1]
        try:
            self.cluster.close_session(session_id)
            self.cluster.unregister(name)
        except FleetError:
            return  # it is tried again at the end
        self.opened.pop()

    def _asked(self, session: Any) -> str:
        """In another thread, as `bounded` does: Ctrl-C in the middle of a call of gRPC may leave
        its channel without answers, and what was opened could not be closed any more."""
        create = partial(self.cluster.create, session, request("greet"))
        return bounded(create, CALL_S, "create task")

    def _first_answer(self, session: Any, session_id: str, *, installed: bool) -> dict[str, Any]:
        """Ask until an executor answers; say meanwhile what stands in the way."""
        began = told = self.clock()
        refusals = 0
        task = self._asked(session)
        while not self.stopped():
            try:
                news = bounded(partial(self.cluster.ask, session, task), CALL_S, "get task")
                if news.state == SUCCEED:
                    return self._answer(session, news)
                if news.state in (FAILED, CANCELLED) and refusals < _REFUSALS:
                    refusals += 1
                    task = self._asked(session)
                    continue
                if news.state in (FAILED, CANCELLED):
                    raise FleetError(
                        "The first executor could not say what it is "
                        f"({news.message or 'no reason given'}).",
                        "rlflame cluster-check",
                    )
                failures = self._bind_failures(session_id)
                now = self.clock()
                pause_s = _TELL_EVERY_S if now - began < _LONG_S else _LONG_S
                if now - told >= pause_s and news.state != RUNNING:
                    told = now
                    self.tell(
                        self.situation(session_id, now - began, failures, installed=installed)
                    )
            except Unanswered:
                now = self.clock()
            if now - began > self.wishes.start_deadline_s:
                raise self._nobody(session_id, installed=installed)
            time.sleep(_LOOK_EVERY_S if now - began > 1.0 else 0.02)
        raise _closed()

    def _answer(self, session: Any, news: TaskNews) -> dict[str, Any]:
        place = object_cache.place(news.output or b"", session)
        try:
            content = object_cache.get(place.key)
        except KeyError as error:
            raise FleetError(
                f"The object cache at {self.cluster.cache_endpoint} does not have the first "
                f"executor's answer, which was put into {place.endpoint}.",
                "if that is the object cache of this cluster: "
                f"export FLAME_CACHE_ENDPOINT={place.endpoint}",
            ) from error
        greeting = parse_greeting(content)
        object_cache.delete(place.key)
        return greeting

    def stalled(self, started: Started, waited_s: float) -> None:
        """Nothing runs in the middle of a run: say why, or raise what makes it hopeless."""
        failures = self._bind_failures(started.session_id)
        if waited_s > self.wishes.start_deadline_s:
            raise self._nobody(started.session_id, installed=started.installed)
        self.tell(
            self.situation(started.session_id, waited_s, failures, installed=started.installed)
        )

    def _bind_failures(self, session_id: str) -> list[str]:
        """What executors said that could not take the session up; raises once they gave up."""
        events = self.cluster.session(session_id).events
        texts = [event.message for event in events if event.code == BIND_FAILED]
        if any(event.code == SESSION_PAUSED for event in events):
            raise Paused(
                f"No executor could start: {texts[-1] if texts else 'no reason given'}.",
                "the executor's log is under FLAME_HOME/logs; rlflame cluster-check",
            )
        return texts

    def situation(
        self, session_id: str, waited_s: float, failures: list[str], *, installed: bool
    ) -> str:
        """One line for whoever waits for the first executor."""
        executors = self.cluster.executors()
        held = Counter(executor.status.session_id for executor in executors)
        states = held.pop(session_id, 0)
        held.pop("", None)
        waited = f"{waited_s:.0f} s"
        if failures:
            return f"an executor failed to start, trying again: {failures[-1][:200]}"
        if not states and held:
            most, number = held.most_common(1)[0]
            return (
                f"waiting for an executor, {waited}: other sessions have {sum(held.values())} of "
                f"{len(executors)}, {most} alone {number}; rlflame cluster-check --clean removes "
                "those of dead runs"
            )
        if not states and not self._fits():
            return (
                f"waiting for an executor, {waited}: no node is as large as runtime.flame.cpu and "
                "memory want one to be"
            )
        if not states:
            why = "; rlflame cluster-check tells why" if waited_s > _LONG_S else ""
            return f"waiting for an executor, {waited}{why}"
        doing = "installing on" if installed else "starting"
        plural = "" if states == 1 else "s"
        return f"{doing} {states} executor{plural}, {waited}"

    def _fits(self) -> bool:
        """Whether any node could hold an executor as it was asked for, were it empty."""
        cpus, memory_bytes = self.wishes.cpu or 0, self.wishes.memory_bytes or 0
        sizes = [node.status.capacity for node in self.cluster.nodes() if node.status.state == 1]
        return not sizes or any(s.cpu >= cpus and s.memory >= memory_bytes for s in sizes)

    def _nobody(self, session_id: str, *, installed: bool) -> RlflameError:
        try:
            seen = self.situation(session_id, self.wishes.start_deadline_s, [], installed=installed)
        except FleetError as error:
            seen = error.message
        return FleetUnreachable(
            f"No executor answered within {self.wishes.start_deadline_s:g} s ({seen}).",
            "rlflame cluster-check tells why; to wait longer: "
            "--set runtime.flame.start_deadline_s=900",
        )


def _closed() -> FleetError:
    return FleetError("The fleet was closed before it had started.")


def _major(version: str) -> str:
    return version.split(".")[0]


class Paused(FleetError):
    """The cluster has given up starting executors for a session."""
