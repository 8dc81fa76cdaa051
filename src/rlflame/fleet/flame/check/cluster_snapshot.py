"""Snapshots of a cluster as values, and the findings that follow from several of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.terminal_text import format_count

from ..client import BIND_FAILED, EXECUTOR_STATES, OPEN, SESSION_PAUSED, FlameClient
from .findings import Check, CheckTimeouts, Finding

NODE_STATES = ("Unknown", "Ready", "NotReady")
GIB = 1 << 30
#: States that a healthy executor passes at once.
_TRANSIENT_STATES = ("Void", "Unbinding", "Releasing")
_MAX_NAMES = 4
GANG_FIX = (
    "put gang into cluster.policies of flame-cluster.yaml (v0.6.0 starts no executor without it; "
    "later versions must not have it) and restart the session manager"
)


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    state: str
    cpu: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Executor:
    id: str
    node: str
    state: str
    session: str
    cpu: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ClusterSession:
    """An open session."""

    id: str
    application: str
    pending: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    #: Flame gives it no executors any more.
    paused: bool = False
    #: The message of the last executor that could not take it.
    problem: str = ""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return (self.pending, self.running, self.succeeded, self.failed)


@dataclass(frozen=True, slots=True)
class Application:
    name: str
    description: str = ""
    #: It has a package that executors install before they serve it.
    installs: bool = False


@dataclass(frozen=True)
class ClusterSnapshot:
    at_s: float
    nodes: tuple[Node, ...] = ()
    executors: tuple[Executor, ...] = ()
    #: The open ones.
    sessions: tuple[ClusterSession, ...] = ()
    applications: tuple[Application, ...] = ()

    @property
    def ready_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.state == "Ready"]

    def find_session(self, session_id: str) -> ClusterSession | None:
        return next((session for session in self.sessions if session.id == session_id), None)

    def count_free(self, node: Node) -> tuple[int, int]:
        """Processors and bytes that no executor has been granted."""
        executors = [executor for executor in self.executors if executor.node == node.name]
        return (
            node.cpu - sum(executor.cpu for executor in executors),
            node.memory_bytes - sum(executor.memory_bytes for executor in executors),
        )

    @property
    def room(self) -> int:
        """How many more executors of one processor and one GiB there is room for."""
        free = [self.count_free(node) for node in self.ready_nodes]
        return sum(max(0, min(cpu, memory_bytes // GIB)) for cpu, memory_bytes in free)


def take_snapshot(client: FlameClient, at_s: float) -> ClusterSnapshot:
    """Look at everything once; raises FleetError if the session manager does not answer."""
    nodes = []
    for node in client.call("list_nodes"):
        size, state = node.status.capacity, NODE_STATES[node.status.state]
        nodes.append(Node(node.metadata.name, state, int(size.cpu), int(size.memory)))
    executors = []
    for executor in client.call("list_executors"):
        spec, state = executor.spec, EXECUTOR_STATES[executor.status.state]
        size = (int(spec.resreq.cpu), int(spec.resreq.memory))
        session_id = executor.status.session_id
        executors.append(Executor(executor.metadata.id, spec.node, state, session_id, *size))
    sessions = []
    for session in client.call("list_sessions"):
        if session.state != OPEN:
            continue
        counts = (session.pending, session.running, session.succeed, session.failed)
        is_paused = any(event.code == SESSION_PAUSED for event in session.events)
        problems = ["", *(e.message for e in session.events if e.code == BIND_FAILED)]
        sessions.append(
            ClusterSession(session.id, session.application, *counts, is_paused, problems[-1])
        )
    applications = [
        Application(application.name, application.description or "", bool(application.url))
        for application in client.call("list_applications")
    ]
    return ClusterSnapshot(
        at_s, tuple(nodes), tuple(executors), tuple(sessions), tuple(applications)
    )


def check_nodes(snapshot: ClusterSnapshot) -> Finding:
    check = Check("nodes", nodes={node.name: node.state for node in snapshot.nodes})
    if not snapshot.nodes:
        return check.make_failure(
            "no executor manager has ever reported",
            "start one; on this machine: docker compose -f compose/compose.yaml up -d",
        )
    lost, ready, unready = (
        [node.name for node in snapshot.nodes if node.state == state] for state in NODE_STATES
    )
    seen = f"{len(ready)} of {len(snapshot.nodes)} ready"
    if unready:
        names = _format_names(unready)
        return check.make_failure(
            f"{seen}; NotReady: {names}; Flame goes on sending executors there, where they wait "
            "for ever",
            f"start the executor manager of {names} again, under the same hostname",
            "gone for good: stop the session manager, remove nodes/NAME from its storage folder, "
            "start it again",
        )
    if lost:
        # Nothing can run if all nodes are away.
        make_finding = check.make_warning if ready else check.make_failure
        return make_finding(
            f"{seen}; lost within the last 30 s: {_format_names(lost)}",
            "wait 30 s, then rlflame cluster-check",
        )
    return check.make_ok(f"{len(ready)} ready: {_format_names(ready)}")


def check_capacity(snapshot: ClusterSnapshot) -> Finding:
    room, parts = snapshot.room, []
    check = Check("capacity", room=room, nodes={})
    for node in snapshot.ready_nodes:
        cpu, memory_bytes = snapshot.count_free(node)
        check.facts["nodes"][node.name] = {
            "cpu": node.cpu,
            "free_cpu": cpu,
            "memory_bytes": node.memory_bytes,
            "free_memory_bytes": memory_bytes,
        }
        parts.append(
            f"{node.name} {cpu} of {format_count(node.cpu, 'processor')}, "
            f"{memory_bytes / GIB:.1f} of {node.memory_bytes / GIB:.1f} GiB"
        )
    summary = _format_names(parts, "; ")
    if room or not parts:
        return check.make_ok(f"room for {format_count(room, 'executor')}: {summary}")
    holders = Counter(executor.session or "no session" for executor in snapshot.executors)
    names = _format_names([f"{session} ({number})" for session, number in holders.most_common()])
    return check.make_warning(
        f"no room for another executor ({summary}); they are held by {names or 'nobody'}",
        "new runs wait until one of these ends; rlflame cluster-check --clean ends dead ones",
    )


@dataclass(frozen=True, slots=True)
class StuckExecutor:
    executor: Executor
    duration_s: float
    reason: str
    #: It might as well be busy for long.
    uncertain: bool = False


def find_stuck(
    snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts
) -> list[StuckExecutor]:
    """Executors of the last snapshot that should have moved since an earlier one."""
    stuck = []
    for executor in snapshots[-1].executors:
        first = _find_first_snapshot(executor, snapshots)
        duration_s = snapshots[-1].at_s - first.at_s
        if duration_s < timeouts.still_s:
            continue
        if executor.state in _TRANSIENT_STATES:
            stuck.append(StuckExecutor(executor, duration_s, ""))
        elif executor.state in ("Binding", "Bound"):
            may_start = executor.state == "Binding" and duration_s < timeouts.binding_s
            reason, uncertain = _diagnose(executor, first, snapshots[-1], may_start)
            if reason:
                stuck.append(StuckExecutor(executor, duration_s, reason, uncertain))
    return stuck


def is_undecided(snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts) -> bool:
    """Whether a later snapshot could tell more of an executor that is in passing now."""
    last = snapshots[-1]
    for executor in last.executors:
        is_open = last.find_session(executor.session) is not None
        if executor.state == "Idle" or (is_open and executor.state == "Bound"):
            continue
        is_starting = is_open and executor.state == "Binding"
        limit_s = timeouts.binding_s if is_starting else timeouts.still_s
        if last.at_s - _find_first_snapshot(executor, snapshots).at_s < limit_s:
            return True
    return False


def _find_first_snapshot(
    executor: Executor, snapshots: Sequence[ClusterSnapshot]
) -> ClusterSnapshot:
    """The first of the latest snapshots in which it, and whether its session is open, are equal."""
    first = snapshots[-1]
    is_open = first.find_session(executor.session) is not None
    for snapshot in reversed(snapshots):
        was_open = snapshot.find_session(executor.session) is not None
        if executor not in snapshot.executors or is_open != was_open:
            break
        first = snapshot
    return first


def _diagnose(
    executor: Executor, first: ClusterSnapshot, last: ClusterSnapshot, may_start: bool
) -> tuple[str, bool]:
    """Why an executor with a session is stuck, or nothing; and whether that is uncertain."""
    before, now = first.find_session(executor.session), last.find_session(executor.session)
    if before is None or now is None:
        return "its session is closed", False
    if executor.state == "Binding":
        installs = any(app.name == now.application and app.installs for app in last.applications)
        return "" if may_start else "its worker does not come up", installs
    failed = now.failed - before.failed
    if failed > 0 and now.succeeded == before.succeeded:
        return f"{format_count(failed, 'task')} failed at once", False
    if now.counts != before.counts or not now.pending + now.running:
        return "", False
    if now.running:
        return "its session's tasks do not move", True
    waiting = format_count(now.pending, "pending task")
    return f"it takes none of the {waiting} of its session", False


def check_executors(snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts) -> Finding:
    total = len(snapshots[-1].executors)
    states = Counter(executor.state for executor in snapshots[-1].executors)
    seen = ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none now"
    stuck = find_stuck(snapshots, timeouts)
    check = Check("executors", states=dict(states), stuck=[])
    notes = []
    for entry in stuck:
        executor, reason = entry.executor, f", {entry.reason}" if entry.reason else ""
        fact: dict[str, Any] = {"executor": executor.id, "node": executor.node}
        fact |= {"state": executor.state, "session": executor.session}
        fact |= {"for_s": round(entry.duration_s, 1), "certain": not entry.uncertain}
        check.facts["stuck"].append(fact)
        notes.append(
            f"{executor.id[:8]} on {executor.node}: {executor.state} for at least "
            f"{entry.duration_s:.0f} s{reason}"
        )
    if not stuck:
        return check.make_ok(seen)
    del notes[2 * _MAX_NAMES :]
    certain = [entry for entry in stuck if not entry.uncertain]
    nodes = sorted({entry.executor.node for entry in certain or stuck})
    fixes = [format_remedy(node) for node in nodes]
    if certain:
        text = f"{len(certain)} of {total} stuck, and in the way of every run ({seen})"
        return check.make_failure(text, *fixes, notes=notes)
    return check.make_warning(
        f"{len(stuck)} of {total} did not move ({seen}); long tasks and installations look alike",
        "rlflame cluster-check again in a minute; if it still says so:",
        *fixes,
        notes=notes,
    )


def format_remedy(node: str) -> str:
    """What frees a node: a quick restart gives it its dead executors back."""
    text = f"stop the executor manager on {node}, wait 40 s (less does not help), start it again"
    if re.fullmatch(r"executor-\d+", node):
        text += f"; here: docker compose -f compose/compose.yaml restart {node}, which waits itself"
    return text


def check_scheduling(snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts) -> Finding:
    """Whether waiting tasks are going to get an executor."""
    last = snapshots[-1]
    paused = [session for session in last.sessions if session.paused]
    running = sum(session.running for session in last.sessions)
    pending = sum(session.pending for session in last.sessions)
    check = Check("scheduling", pending=pending, running=running)
    check.facts["paused_sessions"] = [session.id for session in paused]
    starved = [
        session.id
        for session in last.sessions
        if not session.paused and _is_starved(session.id, snapshots, timeouts)
    ]
    if starved and last.room:
        return check.make_failure(
            f"tasks wait in {_format_names(starved)}, processors are free, and no executor is "
            "started",
            GANG_FIX,
            "or cluster.resreq asks for more than any node has: make it smaller",
        )
    if paused:
        return check.make_warning(
            f"{paused[0].id} gets no more executors, because none could start: "
            f"{paused[0].problem[:200]}",
            "end that run and begin it again; the executor's log is under FLAME_HOME/logs",
        )
    return check.make_ok(f"{running} tasks running, {pending} waiting")


def _is_starved(
    session_id: str, snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts
) -> bool:
    """Whether its tasks have waited long enough, with no executor in the cluster."""
    since_s = snapshots[-1].at_s
    for snapshot in reversed(snapshots):
        session = snapshot.find_session(session_id)
        if snapshot.executors or session is None or not session.pending or session.running:
            break
        since_s = snapshot.at_s
    return snapshots[-1].at_s - since_s >= timeouts.still_s


def _format_names(names: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return separator.join(names[:_MAX_NAMES]) + more
