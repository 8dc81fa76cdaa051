"""What several looks at a cluster say about nodes, executors, room and waiting tasks.

Pure: looks in, findings out. Must not know: how looks are taken, the probe, whose sessions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.fleet.flame.check.findings import (
    CheckTimeouts,
    Finding,
    make_failure,
    make_ok,
    make_warning,
)
from rlflame.fleet.flame.check.snapshot import GIB, ClusterSnapshot, Executor, Node
from rlflame.terminal_text import format_count

#: States that an executor passes in no time when all is well.
_TRANSIENT_STATES = ("Void", "Unbinding", "Releasing")
_MAX_NAMES = 4
GANG_FIX = (
    "put gang into cluster.policies of flame-cluster.yaml (v0.6.0 starts no executor without it; "
    "later versions must not have it) and restart the session manager"
)


def check_nodes(snapshot: ClusterSnapshot) -> Finding:
    states = Counter(node.state for node in snapshot.nodes)
    facts: dict[str, Any] = {"nodes": {node.name: node.state for node in snapshot.nodes}}
    if not snapshot.nodes:
        return make_failure(
            "nodes",
            "no executor manager has ever reported",
            "start one; on this machine: docker compose -f compose/compose.yaml up -d",
            **facts,
        )
    not_ready = [node.name for node in snapshot.nodes if node.state == "NotReady"]
    if not_ready:
        names = _format_names(not_ready)
        return make_failure(
            "nodes",
            f"{states['Ready']} of {len(snapshot.nodes)} ready; NotReady: {names}; Flame goes on "
            "sending executors there, where they wait for ever",
            f"start the executor manager of {names} again, under the same hostname",
            "gone for good: stop the session manager, remove nodes/NAME from its storage folder, "
            "start it again",
            **facts,
        )
    lost = [node.name for node in snapshot.nodes if node.state == "Unknown"]
    if lost:
        make_finding = (
            make_warning if states["Ready"] else make_failure
        )  # nothing can run where all are away
        return make_finding(
            "nodes",
            f"{states['Ready']} of {len(snapshot.nodes)} ready; lost within the last 30 s: "
            f"{_format_names(lost)}",
            "wait 30 s, then rlflame cluster-check",
            **facts,
        )
    return make_ok(
        "nodes",
        f"{len(snapshot.nodes)} ready: {_format_names([n.name for n in snapshot.nodes])}",
        **facts,
    )


def check_capacity(snapshot: ClusterSnapshot) -> Finding:
    parts: list[str] = []
    facts: dict[str, Any] = {}
    for node in snapshot.ready_nodes:
        cpu, memory_bytes = snapshot.count_free(node)
        facts[node.name] = {
            "cpu": node.cpu,
            "free_cpu": cpu,
            "memory_bytes": node.memory_bytes,
            "free_memory_bytes": memory_bytes,
        }
        parts.append(
            f"{node.name} {cpu} of {format_count(node.cpu, 'processor')}, "
            f"{memory_bytes / GIB:.1f} of "
            f"{node.memory_bytes / GIB:.1f} GiB"
        )
    summary = "; ".join(parts[:_MAX_NAMES]) + (
        f"; {len(parts) - _MAX_NAMES} more" * (len(parts) > _MAX_NAMES)
    )
    room = snapshot.room
    if room or not snapshot.ready_nodes:
        return make_ok(
            "capacity",
            f"room for {format_count(room, 'executor')}: {summary}",
            room=room,
            nodes=facts,
        )
    holders = Counter(executor.session or "no session" for executor in snapshot.executors)
    holders_text = _format_names(
        [f"{session} ({number})" for session, number in holders.most_common()]
    )
    return make_warning(
        "capacity",
        f"no room for another executor ({summary}); they are held by {holders_text or 'nobody'}",
        "new runs wait until one of these ends; rlflame cluster-check --clean ends dead ones",
        room=0,
        nodes=facts,
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
    """Executors of the last look that have not moved since an earlier one, and should have."""
    stuck_executors = []
    for executor in snapshots[-1].executors:
        first = _find_first_snapshot(executor, snapshots)
        duration_s = snapshots[-1].at_s - first.at_s
        if duration_s >= timeouts.still_s:
            diagnosis = _diagnose(executor, first, snapshots[-1], duration_s, timeouts)
            stuck_executors += [diagnosis] if diagnosis else []
    return stuck_executors


def is_undecided(snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts) -> bool:
    """Whether a later look could tell more of an executor that is in passing now."""
    last = snapshots[-1]
    for executor in last.executors:
        is_open = last.find_session(executor.session) is not None
        limit_s = timeouts.still_s
        if is_open and executor.state == "Binding":
            limit_s = timeouts.binding_s
        elif (is_open and executor.state == "Bound") or executor.state == "Idle":
            continue
        if last.at_s - _find_first_snapshot(executor, snapshots).at_s < limit_s:
            return True
    return False


def _find_first_snapshot(
    executor: Executor, snapshots: Sequence[ClusterSnapshot]
) -> ClusterSnapshot:
    """The first of the last looks in which it, and whether its session was open, were as now."""
    first = snapshots[-1]
    is_open = first.find_session(executor.session) is not None
    for snapshot in reversed(snapshots):
        if executor not in snapshot.executors or is_open != (
            snapshot.find_session(executor.session) is not None
        ):
            break
        first = snapshot
    return first


def _diagnose(
    executor: Executor,
    first: ClusterSnapshot,
    last: ClusterSnapshot,
    duration_s: float,
    timeouts: CheckTimeouts,
) -> StuckExecutor | None:
    before, now = first.find_session(executor.session), last.find_session(executor.session)
    if executor.state in _TRANSIENT_STATES:
        return StuckExecutor(executor, duration_s, "")
    if executor.state not in ("Binding", "Bound"):
        return None
    if before is None or now is None:
        return StuckExecutor(executor, duration_s, "its session is closed")
    if executor.state == "Binding":
        if duration_s < timeouts.binding_s:
            return None
        installs = any(app.name == now.application and app.installs for app in last.applications)
        return StuckExecutor(
            executor, duration_s, "its worker does not come up", uncertain=installs
        )
    if now.failed > before.failed and now.succeeded == before.succeeded:
        return StuckExecutor(
            executor,
            duration_s,
            f"{format_count(now.failed - before.failed, 'task')} failed at once",
        )
    if now.counts != before.counts or not now.pending + now.running:
        return None
    if not now.running:
        waiting = format_count(now.pending, "pending task")
        return StuckExecutor(executor, duration_s, f"it takes none of the {waiting} of its session")
    return StuckExecutor(executor, duration_s, "its session's tasks do not move", uncertain=True)


def check_executors(snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts) -> Finding:
    states = Counter(executor.state for executor in snapshots[-1].executors)
    seen = ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none now"
    stuck_executors = find_stuck(snapshots, timeouts)
    facts: dict[str, Any] = {
        "states": dict(states),
        "stuck": [
            {
                "executor": entry.executor.id,
                "node": entry.executor.node,
                "state": entry.executor.state,
                "session": entry.executor.session,
                "for_s": round(entry.duration_s, 1),
                "certain": not entry.uncertain,
            }
            for entry in stuck_executors
        ],
    }
    if not stuck_executors:
        return make_ok("executors", seen, **facts)
    notes = [
        f"{entry.executor.id[:8]} on {entry.executor.node}: {entry.executor.state} for at least "
        f"{entry.duration_s:.0f} s" + (f", {entry.reason}" if entry.reason else "")
        for entry in stuck_executors[: 2 * _MAX_NAMES]
    ]
    certain = [entry for entry in stuck_executors if not entry.uncertain]
    fixes = [
        format_remedy(node)
        for node in sorted({entry.executor.node for entry in certain or stuck_executors})
    ]
    if certain:
        text = (
            f"{len(certain)} of {len(snapshots[-1].executors)} stuck, and in the way of every run"
        )
        return make_failure("executors", f"{text} ({seen})", *fixes, notes=notes, **facts)
    return make_warning(
        "executors",
        f"{len(stuck_executors)} of {len(snapshots[-1].executors)} did not move; long tasks and "
        "installations "
        f"look the same ({seen})",
        "rlflame cluster-check again in a minute; if it still says so:",
        *fixes,
        notes=notes,
        **facts,
    )


def format_remedy(node: str) -> str:
    """What frees a node: a quick restart gives it its dead executors back."""
    text = f"stop the executor manager on {node}, wait 40 s (less does not help), start it again"
    if re.fullmatch(r"executor-\d+", node):
        text += f"; here: docker compose -f compose/compose.yaml restart {node}, which waits itself"
    return text


def check_scheduling(snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts) -> Finding:
    """Whether tasks that wait are going to get an executor."""
    last = snapshots[-1]
    paused = [session for session in last.sessions if session.paused]
    waiting = [s for s in last.sessions if s.pending and not s.running and not s.paused]
    facts: dict[str, Any] = {
        "pending": sum(session.pending for session in last.sessions),
        "running": sum(session.running for session in last.sessions),
        "paused_sessions": [session.id for session in paused],
    }
    starved = [session.id for session in waiting if _is_starved(session.id, snapshots, timeouts)]
    if starved and any(_has_room(node, last) for node in last.ready_nodes):
        return make_failure(
            "scheduling",
            f"tasks wait in {_format_names(starved)}, processors are free, and no executor is "
            "started",
            GANG_FIX,
            "or cluster.resreq asks for more than any node has: make it smaller",
            **facts,
        )
    if paused:
        first = paused[0]
        return make_warning(
            "scheduling",
            f"{first.id} gets no more executors, because none could start: {first.problem[:200]}",
            "end that run and begin it again; the executor's log is under FLAME_HOME/logs",
            **facts,
        )
    return make_ok(
        "scheduling", f"{facts['running']} tasks running, {facts['pending']} waiting", **facts
    )


def _is_starved(
    session_id: str, snapshots: Sequence[ClusterSnapshot], timeouts: CheckTimeouts
) -> bool:
    """Whether it has waited through looks far enough apart, with no executor in the cluster."""
    since_s = snapshots[-1].at_s
    for snapshot in reversed(snapshots):
        session = snapshot.find_session(session_id)
        if snapshot.executors or session is None or not session.pending or session.running:
            break
        since_s = snapshot.at_s
    return snapshots[-1].at_s - since_s >= timeouts.still_s


def _has_room(node: Node, snapshot: ClusterSnapshot) -> bool:
    cpu, memory_bytes = snapshot.count_free(node)
    return cpu >= 1 and memory_bytes >= GIB


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
