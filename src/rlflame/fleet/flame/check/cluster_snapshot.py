"""Takes snapshots of a cluster, and derives findings from several of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.terminal_text import format_count

from ..client import BIND_FAILED, EXECUTOR_STATES, OPEN, SESSION_PAUSED, FlameClient
from ..cluster_config import START
from .findings import CheckTimeouts, Finding

NODE_STATES = ("Unknown", "Ready", "NotReady")
GIB = 1 << 30
#: States that a healthy executor leaves immediately.
_TRANSIENT_STATES = ("Void", "Unbinding", "Releasing")
_MAX_NAMES = 4
#: v0.6.0 starts no executor without the policy gang, and later versions do not start with it. The
#: default list of each version is right.
POLICY_FIX = (
    "remove cluster.policies from flame-cluster.yaml and restart the session manager: v0.6.0 "
    "needs the policy gang, later versions do not start with it, and the default of each fits"
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
    failure_count: int = 0
    #: Whether Flame has stopped starting executors for the session.
    is_paused: bool = False
    #: The message of the last executor that failed to bind to the session.
    problem: str = ""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return (self.pending, self.running, self.succeeded, self.failure_count)


@dataclass(frozen=True, slots=True)
class Application:
    name: str
    description: str = ""
    #: Whether executors install a package before they serve the application.
    installs: bool = False


@dataclass(frozen=True)
class ClusterSnapshot:
    at_s: float
    nodes: tuple[Node, ...] = ()
    executors: tuple[Executor, ...] = ()
    #: Open sessions only.
    sessions: tuple[ClusterSession, ...] = ()
    applications: tuple[Application, ...] = ()

    def find_session(self, session_id: str) -> ClusterSession | None:
        return next((session for session in self.sessions if session.id == session_id), None)

    @property
    def room(self) -> int:
        """The number of additional executors (one processor, 1 GiB each) that fit."""
        room = 0
        for node in self.nodes:
            if node.state == "Ready":
                executors = [executor for executor in self.executors if executor.node == node.name]
                free_cpu = node.cpu - sum(executor.cpu for executor in executors)
                used_bytes = sum(executor.memory_bytes for executor in executors)
                room += max(0, min(free_cpu, (node.memory_bytes - used_bytes) // GIB))
        return room


def take_snapshot(client: FlameClient, at_s: float) -> ClusterSnapshot:
    """Query the cluster once; raise FleetError if it does not answer."""
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
    facts = {"nodes": {node.name: node.state for node in snapshot.nodes}}
    if not snapshot.nodes:
        text = "no executor manager has registered"
        return Finding(
            "nodes", "failed", text, (f"start one; on this machine: {START}",), (), facts
        )
    missing = [node.name for node in snapshot.nodes if node.state != "Ready"]
    text = f"{len(snapshot.nodes) - len(missing)} of {len(snapshot.nodes)} ready"
    if not missing:
        return Finding("nodes", "ok", text, facts=facts)
    names = _format_names(missing)
    text += f"; not ready: {names}; executors that Flame assigns there wait forever"
    fixes = (
        f"restart the executor manager of {names} under the same hostname",
        "if the node is gone for good: stop the session manager, remove nodes/NAME from its "
        "storage folder, and start it again",
    )
    return Finding("nodes", "failed", text, fixes, (), facts)


def check_capacity(snapshot: ClusterSnapshot) -> Finding:
    room = snapshot.room
    facts = {"room": room}
    if room:
        return Finding("capacity", "ok", f"room for {format_count(room, 'executor')}", facts=facts)
    holders = Counter(executor.session or "no session" for executor in snapshot.executors)
    names = _format_names([f"{session} ({number})" for session, number in holders.most_common()])
    text = f"no room for another executor; existing ones are held by {names or 'nobody'}"
    fix = "new runs wait until one of these ends; rlflame cluster-check --clean removes dead runs"
    return Finding("capacity", "warning", text, (fix,), (), facts)


def find_stuck(
    snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts
) -> tuple[list[dict[str, Any]], bool]:
    """Return the stuck executors, and whether later snapshots may show more of them.

    In an executor's entry, `certain` is false if a long task or a long installation would look the
    same.
    """
    stalls, is_undecided, last = [], False, snapshots[-1]
    for executor in last.executors:
        session = last.find_session(executor.session)
        first = last
        for snapshot in reversed(snapshots):
            was_open = snapshot.find_session(executor.session) is not None
            if executor not in snapshot.executors or was_open != (session is not None):
                break
            first = snapshot
        reason, is_certain = _diagnose(executor, first, last)
        is_starting = executor.state == "Binding" and session is not None
        duration_s = last.at_s - first.at_s
        if reason and duration_s < (timeouts.binding_s if is_starting else timeouts.still_s):
            is_undecided = True
        elif reason:
            fact: dict[str, Any] = {"executor": executor.id, "node": executor.node}
            fact |= {"state": executor.state, "reason": reason}
            stalls.append({**fact, "for_s": round(duration_s, 1), "certain": is_certain})
    return stalls, is_undecided


def _diagnose(
    executor: Executor, first: ClusterSnapshot, last: ClusterSnapshot
) -> tuple[str, bool]:
    """Return why an executor may be stuck ("" if not) and whether that is certain."""
    if executor.state in _TRANSIENT_STATES:
        return "a state that healthy executors leave immediately", True
    earlier_session, now = first.find_session(executor.session), last.find_session(executor.session)
    if executor.state not in ("Binding", "Bound"):
        return "", True
    if earlier_session is None or now is None:
        return "its session is closed", True
    if executor.state == "Binding":
        installs = any(app.name == now.application and app.installs for app in last.applications)
        return "its worker does not start", not installs
    failure_count = now.failure_count - earlier_session.failure_count
    if failure_count and now.succeeded == earlier_session.succeeded:
        return f"{format_count(failure_count, 'task')} failed and none succeeded", True
    if now.counts != earlier_session.counts or not now.pending + now.running:
        return "", True
    return "its session's tasks make no progress", not now.running


def check_executors(snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts) -> Finding:
    states = Counter(executor.state for executor in snapshots[-1].executors)
    text = ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none now"
    stalls, _ = find_stuck(snapshots, timeouts)
    facts = {"states": dict(states), "stuck": stalls}
    if not stalls:
        return Finding("executors", "ok", text, facts=facts)
    notes = tuple(
        f"{fact['executor'][:8]} on {fact['node']}: {fact['state']} for at least "
        f"{fact['for_s']:.0f} s, {fact['reason']}"
        for fact in stalls[: 2 * _MAX_NAMES]
    )
    notes += tuple(
        f"the cause is in {fact['executor']}/{fact['executor']}.err, in the folder where the "
        f"executor manager of {fact['node']} runs (compose: /usr/local/flame/work), or in "
        "FLAME_HOME/logs/install"
        for fact in [fact for fact in stalls if fact["state"] == "Binding"][:1]
    )
    certain = [fact for fact in stalls if fact["certain"]]
    fixes = tuple(format_remedy(node) for node in sorted({f["node"] for f in certain or stalls}))
    if certain:
        text = f"{len(certain)} stuck, which blocks every run ({text})"
        return Finding("executors", "failed", text, fixes, notes, facts)
    text = f"{len(stalls)} made no progress ({text}); long tasks and installations look the same"
    retry = "run rlflame cluster-check again in a minute; if the warning remains:"
    return Finding("executors", "warning", text, (retry, *fixes), notes, facts)


def format_remedy(node: str) -> str:
    """Return instructions for freeing a node (a quick restart keeps dead executors)."""
    text = f"stop the executor manager on {node}, wait 40 s (not less) and start it again"
    if re.fullmatch(r"executor-\d+", node):
        text += f"; here: docker compose -f compose/compose.yaml restart {node} (includes the wait)"
    return text


def check_scheduling(snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts) -> Finding:
    """Check that waiting tasks can get an executor."""
    last = snapshots[-1]
    paused_sessions = [session for session in last.sessions if session.is_paused]
    running = sum(session.running for session in last.sessions)
    pending = sum(session.pending for session in last.sessions)
    facts = {"pending": pending, "running": running}
    ids = [
        session.id
        for session in last.sessions
        if not session.is_paused and _is_starved(session.id, snapshots, timeouts)
    ]
    if ids and last.room:
        text = f"tasks wait in {_format_names(ids)}, but no executor is started"
        fixes = (
            POLICY_FIX,
            "or reduce cluster.resreq, if it exceeds the size of every node",
        )
        return Finding("scheduling", "failed", text, fixes, (), facts)
    if paused_sessions:
        reason = paused_sessions[0].problem[:200]
        text = f"{paused_sessions[0].id} gets no more executors, because none could start: {reason}"
        fix = "stop that run and start it again; the executor's log is under FLAME_HOME/logs"
        return Finding("scheduling", "warning", text, (fix,), (), facts)
    text = f"{running} tasks running, {pending} waiting"
    return Finding("scheduling", "ok", text, facts=facts)


def _is_starved(
    session_id: str, snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts
) -> bool:
    """Return whether a session has waited for `still_s` while no executor existed."""
    since_s = snapshots[-1].at_s
    for snapshot in reversed(snapshots):
        session = snapshot.find_session(session_id)
        if snapshot.executors or session is None or not session.pending or session.running:
            break
        since_s = snapshot.at_s
    return snapshots[-1].at_s - since_s >= timeouts.still_s


def _format_names(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + suffix
