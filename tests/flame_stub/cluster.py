"""The stub's interface for tests: start, select, inspect, disturb and stop it.

This module assembles the parts and does not know their protocols.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flamepy.proto import types_pb2 as pb

from flame_stub.cache import Cache
from flame_stub.client import reset_client
from flame_stub.executors import Life
from flame_stub.faults import Faults
from flame_stub.frontend import Frontend
from flame_stub.install import Installer
from flame_stub.records import Executor, Node, Resources
from flame_stub.state import NAMES, State

GIB = 1 << 30
POLICIES = ("priority", "drf", "gang")


@dataclass(frozen=True)
class TaskView:
    """A copy of a task's state. `attempts` counts how often it was given to a worker."""

    id: str
    state: str
    attempts: int
    events: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class SessionView:
    id: str
    application: str
    state: str
    events: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class ExecutorView:
    """A copy of an executor's state. `pid` is its worker process, if it has one."""

    id: str
    node: str
    state: str
    pid: int | None
    session: str | None


class FlameStub:
    """A fake Flame cluster on loopback: `with FlameStub(2) as stub`.

    `executors` is the number of processors, divided among `nodes` nodes (`node-1`, `node-2`, ...)
    with 4 GiB per processor. `worker_path` lists the folders with the packages of a prepared
    executor image. `hidden` names modules that workers must not find although this interpreter has
    them.
    `delay_release_s` belongs to the template application `flmrun`.
    """

    reset_client = staticmethod(reset_client)

    def __init__(
        self,
        executors: int = 2,
        faults: Faults | None = None,
        *,
        nodes: int = 1,
        policies: Sequence[str] = POLICIES,
        worker_path: Sequence[str] = (),
        hidden: Sequence[str] = (),
        delay_release_s: int = 60,
    ) -> None:
        self.faults = faults or Faults()
        self._policies = policies
        self._worker_path, self._hidden = worker_path, hidden
        shares = [executors // nodes + (i < executors % nodes) for i in range(nodes)]
        self._nodes = [
            Node(f"node-{i + 1}", Resources(share, 4 * GIB * share))
            for i, share in enumerate(shares)
        ]
        self._delay_release_s = delay_release_s
        self._logs: dict[str, str] = {}
        self._lives: dict[str, Life] = {}

    def __enter__(self) -> FlameStub:
        # The path of a socket must be shorter than 108 bytes, for any temporary folder.
        self._root = Path(tempfile.mkdtemp(prefix="flame-"))
        if len(str(self._root)) > 50:
            self._root.rmdir()
            self._root = Path(tempfile.mkdtemp(prefix="flame-", dir="/tmp"))
        (self._root / "s").mkdir()
        self._state = State(self._nodes, self._policies, self.faults)
        self._state.start = self._start_executor
        self._register_templates()
        self._cache = Cache(self.faults)
        self._installers = {
            node.name: Installer(
                self._root / node.name, self._cache.fetch, self._hidden, self._worker_path
            )
            for node in self._nodes
        }
        self._frontend = Frontend(self._state)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """The environment variables that select this stub."""
        return {
            "FLAME_ENDPOINT": f"http://127.0.0.1:{self._frontend.port}",
            "FLAME_CACHE_ENDPOINT": self._cache.endpoint,
        }

    def close(self) -> None:
        """End workers, servers and threads, and remove all files except the logs."""
        self._logs |= self.logs()
        with self._state.lock:
            if self._state.closing:
                return
            self._state.closing = True
            for executor in self._state.executors.values():
                executor.gone = True
            self._state.changed.notify_all()
        self.kill_all_children(signal.SIGKILL)
        for life in list(self._lives.values()):
            life.stop()
        self._frontend.stop()
        self._cache.stop()
        shutil.rmtree(self._root)

    def _start_executor(self, executor: Executor) -> None:
        life = Life(
            executor,
            self._state,
            self._installers[executor.node],
            self._root,
            self.environment,
            self._logs.__setitem__,
        )
        self._lives[executor.id] = life
        life.start()

    def _register_templates(self) -> None:
        run = "run --python python${FLAME_PYTHON_VERSION} python -m flamepy.runner.runpy"
        flmrun = pb.ApplicationSpec(
            description="The Flame Runner application.",
            command="${FLAME_HOME}/bin/uv",
            arguments=run.split(),
            installer="python",
            delay_release=self._delay_release_s,
            schema=pb.ApplicationSchema(),
        )
        self._state.register("flmrun", flmrun)
        for name in ("flmping", "flmexec"):
            command = f"${{FLAME_HOME}}/bin/{name}-service"
            self._state.register(name, pb.ApplicationSpec(command=command))

    # Inspection

    def objects(self) -> dict[str, int]:
        """Keys of the objects in the cache and their sizes in bytes."""
        return self._cache.store.sizes()

    def store(self, key: str, data: bytes) -> None:
        """Put bytes into the cache without changes, as any client can."""
        self._cache.store.put(key, data)

    @property
    def cache_bytes(self) -> int:
        return sum(self.objects().values())

    def applications(self) -> list[str]:
        """The names of all applications except the three that come with Flame."""
        with self._state.lock:
            own = {"flmrun", "flmping", "flmexec"}
            return [name for name in self._state.applications if name not in own]

    def sessions(self) -> list[SessionView]:
        with self._state.lock:
            return [
                SessionView(s.id, s.spec.application, pb.SessionState.Name(s.state), shown(s))
                for s in self._state.sessions.values()
            ]

    def tasks(self, session_id: str) -> list[TaskView]:
        with self._state.lock:
            tasks = self._state.session(session_id).tasks.values()
            return [TaskView(str(t.id), NAMES[t.state], t.attempts, shown(t)) for t in tasks]

    def executors(self) -> list[ExecutorView]:
        with self._state.lock:
            return [
                ExecutorView(
                    e.id,
                    e.node,
                    pb.ExecutorState.Name(e.state).removeprefix("Executor"),
                    e.pid,
                    e.bound_to,
                )
                for e in self._state.executors.values()
            ]

    @property
    def open_watches(self) -> int:
        """The number of WatchTask streams that clients keep open."""
        return self._frontend.open_watches

    def logs(self) -> dict[str, str]:
        """The stderr of all workers, running or ended."""
        living = {name: life.log() for name, life in list(self._lives.items())}
        return self._logs | {name: text for name, text in living.items() if text}

    # Disturbances

    def kill_executor(self, executor_id: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the worker process of an executor."""
        self._lives[executor_id].kill(number)

    def kill_all_children(self, number: int = signal.SIGKILL) -> None:
        for life in list(self._lives.values()):
            life.kill(number)

    def expire_idle(self) -> None:
        """Make delay_release pass for all executors that wait for a task."""
        with self._state.lock:
            for executor in self._state.executors.values():
                executor.let_go = executor.task is None
            self._state.changed.notify_all()

    def stop_session_manager(self) -> None:
        """Break all streams with UNAVAILABLE and refuse calls. Running tasks continue."""
        with self._state.lock:
            self._state.online = False
            self._state.changed.notify_all()
        self._frontend.stop()

    def start_session_manager(self) -> None:
        """Restore the state from storage and queue running tasks again, perhaps twice."""
        self._frontend.start()
        self._state.recover()

    def restart_session_manager(self) -> None:
        self.stop_session_manager()
        self.start_session_manager()

    def stop_cache(self) -> None:
        self._cache.stop()

    def start_cache(self, lose: bool = False) -> None:
        """Start the cache again, with its objects unless they are to be lost."""
        self._cache.start(lose)

    def restart_cache(self, lose: bool = False) -> None:
        self.stop_cache()
        self.start_cache(lose)

    def lose_node(self, name: str, noticed: bool = True) -> None:
        """Remove a node and its processes. Its executors remain until this is noticed."""
        with self._state.lock:
            self._state.nodes[name].state = pb.Unknown
            lost = [e for e in self._state.executors.values() if e.node == name]
            for executor in lost:
                executor.gone = True
            self._state.changed.notify_all()
        for executor in lost:
            self._lives[executor.id].kill(signal.SIGKILL)
        if noticed:
            self.notice_loss(name)

    def notice_loss(self, name: str) -> None:
        """Skip the 30 s after which the node is NotReady and its executors are deleted."""
        self._state.forget_node(name)

    def return_node(self, name: str) -> None:
        """Return the node. If its loss was not noticed, its executors are Bound and dead."""
        with self._state.lock:
            self._state.nodes[name].state = pb.Ready
            self._state.settle()


def shown(record: Any) -> tuple[tuple[int, str], ...]:
    return tuple((event.code, event.text) for event in record.events)
