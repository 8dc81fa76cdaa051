"""What several looks at a cluster say about nodes, executors, room and waiting tasks.

Pure: looks in, findings out. Must not know: how looks are taken, the probe, whose sessions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflame.fleet.flame.check.findings import Finding, Pace, failed, ok, warning
from rlflame.fleet.flame.check.snapshot import GIB, Executor, Look, Node
from rlflame.text import format_count

#: States that an executor passes in no time when all is well.
_PASSING = ("Void", "Unbinding", "Releasing")
_SHOWN = 4
GANG = (
    "put gang into cluster.policies of flame-cluster.yaml (v0.6.0 starts no executor without it; "
    "later versions must not have it) and restart the session manager"
)


def nodes(look: Look) -> Finding:
    states = Counter(node.state for node in look.nodes)
    facts: dict[str, Any] = {"nodes": {node.name: node.state for node in look.nodes}}
    if not look.nodes:
        return failed(
            "nodes",
            "no executor manager has ever reported",
            "start one; on this machine: docker compose -f compose/compose.yaml up -d",
            **facts,
        )
    away = [node.name for node in look.nodes if node.state == "NotReady"]
    if away:
        names = _listed(away)
        return failed(
            "nodes",
            f"{states['Ready']} of {len(look.nodes)} ready; NotReady: {names}; Flame goes on "
            "sending executors there, where they wait for ever",
            f"start the executor manager of {names} again, under the same hostname",
            "gone for good: stop the session manager, remove nodes/NAME from its storage folder, "
            "start it again",
            **facts,
        )
    lost = [node.name for node in look.nodes if node.state == "Unknown"]
    if lost:
        say = warning if states["Ready"] else failed  # nothing can run where all are away
        return say(
            "nodes",
            f"{states['Ready']} of {len(look.nodes)} ready; lost within the last 30 s: "
            f"{_listed(lost)}",
            "wait 30 s, then rlflame cluster-check",
            **facts,
        )
    return ok("nodes", f"{len(look.nodes)} ready: {_listed([n.name for n in look.nodes])}", **facts)


def capacity(look: Look) -> Finding:
    parts: list[str] = []
    facts: dict[str, Any] = {}
    for node in look.ready:
        cpu, memory_bytes = look.free(node)
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
    shown = "; ".join(parts[:_SHOWN]) + (f"; {len(parts) - _SHOWN} more" * (len(parts) > _SHOWN))
    room = look.room
    if room or not look.ready:
        return ok(
            "capacity",
            f"room for {format_count(room, 'executor')}: {shown}",
            room=room,
            nodes=facts,
        )
    holders = Counter(executor.session or "no session" for executor in look.executors)
    held = _listed([f"{session} ({number})" for session, number in holders.most_common()])
    return warning(
        "capacity",
        f"no room for another executor ({shown}); they are held by {held or 'nobody'}",
        "new runs wait until one of these ends; rlflame cluster-check --clean ends dead ones",
        room=0,
        nodes=facts,
    )


@dataclass(frozen=True, slots=True)
class Stuck:
    executor: Executor
    for_s: float
    why: str
    #: It might as well be busy for long.
    perhaps: bool = False


def stuck(looks: Sequence[Look], pace: Pace) -> list[Stuck]:
    """Executors of the last look that have not moved since an earlier one, and should have."""
    found = []
    for executor in looks[-1].executors:
        first = _since(executor, looks)
        for_s = looks[-1].at_s - first.at_s
        if for_s >= pace.still_s:
            judged = _judge(executor, first, looks[-1], for_s, pace)
            found += [judged] if judged else []
    return found


def undecided(looks: Sequence[Look], pace: Pace) -> bool:
    """Whether a later look could tell more of an executor that is in passing now."""
    last = looks[-1]
    for executor in last.executors:
        is_open = last.session(executor.session) is not None
        limit_s = pace.still_s
        if is_open and executor.state == "Binding":
            limit_s = pace.binding_s
        elif (is_open and executor.state == "Bound") or executor.state == "Idle":
            continue
        if last.at_s - _since(executor, looks).at_s < limit_s:
            return True
    return False


def _since(executor: Executor, looks: Sequence[Look]) -> Look:
    """The first of the last looks in which it, and whether its session was open, were as now."""
    first = looks[-1]
    is_open = first.session(executor.session) is not None
    for look in reversed(looks):
        if executor not in look.executors or is_open != (
            look.session(executor.session) is not None
        ):
            break
        first = look
    return first


def _judge(executor: Executor, first: Look, last: Look, for_s: float, pace: Pace) -> Stuck | None:
    before, now = first.session(executor.session), last.session(executor.session)
    if executor.state in _PASSING:
        return Stuck(executor, for_s, "")
    if executor.state not in ("Binding", "Bound"):
        return None
    if before is None or now is None:
        return Stuck(executor, for_s, "its session is closed")
    if executor.state == "Binding":
        if for_s < pace.binding_s:
            return None
        installs = any(app.name == now.application and app.installs for app in last.applications)
        return Stuck(executor, for_s, "its worker does not come up", perhaps=installs)
    if now.failed > before.failed and now.succeeded == before.succeeded:
        return Stuck(
            executor, for_s, f"{format_count(now.failed - before.failed, 'task')} failed at once"
        )
    if now.counts != before.counts or not now.pending + now.running:
        return None
    if not now.running:
        waiting = format_count(now.pending, "pending task")
        return Stuck(executor, for_s, f"it takes none of the {waiting} of its session")
    return Stuck(executor, for_s, "its session's tasks do not move", perhaps=True)


def executors(looks: Sequence[Look], pace: Pace) -> Finding:
    states = Counter(executor.state for executor in looks[-1].executors)
    seen = ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "none now"
    found = stuck(looks, pace)
    facts: dict[str, Any] = {
        "states": dict(states),
        "stuck": [
            {
                "executor": each.executor.id,
                "node": each.executor.node,
                "state": each.executor.state,
                "session": each.executor.session,
                "for_s": round(each.for_s, 1),
                "certain": not each.perhaps,
            }
            for each in found
        ],
    }
    if not found:
        return ok("executors", seen, **facts)
    notes = [
        f"{each.executor.id[:8]} on {each.executor.node}: {each.executor.state} for at least "
        f"{each.for_s:.0f} s" + (f", {each.why}" if each.why else "")
        for each in found[: 2 * _SHOWN]
    ]
    certain = [each for each in found if not each.perhaps]
    fixes = [remedy(node) for node in sorted({each.executor.node for each in certain or found})]
    if certain:
        text = f"{len(certain)} of {len(looks[-1].executors)} stuck, and in the way of every run"
        return failed("executors", f"{text} ({seen})", *fixes, notes=notes, **facts)
    return warning(
        "executors",
        f"{len(found)} of {len(looks[-1].executors)} did not move; long tasks and installations "
        f"look the same ({seen})",
        "rlflame cluster-check again in a minute; if it still says so:",
        *fixes,
        notes=notes,
        **facts,
    )


def remedy(node: str) -> str:
    """What frees a node: a quick restart gives it its dead executors back."""
    text = f"stop the executor manager on {node}, wait 40 s (less does not help), start it again"
    if re.fullmatch(r"executor-\d+", node):
        text += f"; here: docker compose -f compose/compose.yaml restart {node}, which waits itself"
    return text


def scheduling(looks: Sequence[Look], pace: Pace) -> Finding:
    """Whether tasks that wait are going to get an executor."""
    last = looks[-1]
    paused = [session for session in last.sessions if session.paused]
    waiting = [s for s in last.sessions if s.pending and not s.running and not s.paused]
    facts: dict[str, Any] = {
        "pending": sum(session.pending for session in last.sessions),
        "running": sum(session.running for session in last.sessions),
        "paused_sessions": [session.id for session in paused],
    }
    starved = [session.id for session in waiting if _starved(session.id, looks, pace)]
    if starved and any(_fits(node, last) for node in last.ready):
        return failed(
            "scheduling",
            f"tasks wait in {_listed(starved)}, processors are free, and no executor is started",
            GANG,
            "or cluster.resreq asks for more than any node has: make it smaller",
            **facts,
        )
    if paused:
        first = paused[0]
        return warning(
            "scheduling",
            f"{first.id} gets no more executors, because none could start: {first.trouble[:200]}",
            "end that run and begin it again; the executor's log is under FLAME_HOME/logs",
            **facts,
        )
    return ok(
        "scheduling", f"{facts['running']} tasks running, {facts['pending']} waiting", **facts
    )


def _starved(session_id: str, looks: Sequence[Look], pace: Pace) -> bool:
    """Whether it has waited through looks far enough apart, with no executor in the cluster."""
    since = looks[-1].at_s
    for look in reversed(looks):
        session = look.session(session_id)
        if look.executors or session is None or not session.pending or session.running:
            break
        since = look.at_s
    return looks[-1].at_s - since >= pace.still_s


def _fits(node: Node, look: Look) -> bool:
    cpu, memory_bytes = look.free(node)
    return cpu >= 1 and memory_bytes >= GIB


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
