"""Scheduling with the policies priority, drf and gang on a snapshot of the state.

This module does not know time. The real scheduler needs two cycles of 100 ms for each new executor;
the stub creates all of them at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flamepy.proto import types_pb2 as pb

from flame_stub.records import RETRY_LIMIT, Executor, Node, Resources, Session

if TYPE_CHECKING:
    from flame_stub.state import State


def next_executor(state: State) -> tuple[Session, Node] | None:
    """The session that gets the next executor, and the node; None if none is due."""
    if "gang" not in state.policies:
        return None  # without it, all sessions count as served, and none gets an executor
    coming = [e for e in state.executors.values() if e.stuck or e.state == pb.ExecutorUnbinding]
    in_the_way = len(coming)
    for session in in_need(state):
        if in_the_way:
            in_the_way -= 1  # an executor that is about to start counts for this session
            continue
        nodes = [node for node in state.nodes.values() if has_room(state, node, session)]
        if nodes:
            return session, min(nodes, key=lambda node: len(on_node(state, node)))
    return None


def neediest(state: State, idle: Executor) -> Session | None:
    """The session for an Idle executor: its own one, or any that needs more."""
    own, others = [], []
    for session in in_need(state, without=idle):
        (own if session is idle.session else others).append(session)
    return next(iter(own + others), None)


def in_need(state: State, without: Executor | None = None) -> list[Session]:
    """Open sessions that should have more executors, sorted by their number."""
    executors = [e for e in state.executors.values() if e is not without and not e.stuck]
    nodes = state.nodes.values()
    total = Resources()
    for node in nodes:
        total = total.plus(node.capacity)
    is_open = [session for session in state.sessions.values() if session.state == pb.Open]
    left, found = total, []
    for session in sorted(is_open, key=lambda s: s.order):
        granted = session.resreq.times(session.claim).at_most(left)
        left = left.minus(granted)
        own = [e for e in executors if e.session is session]
        used = Resources()
        for executor in own:
            used = used.plus(executor.resreq)
        share = max(a / b for a, b in zip(used, total, strict=True) if b) if any(total) else 0.0
        fair = "drf" in state.policies and session.counts[pb.Pending] and share < 1 / len(is_open)
        prior = "priority" in state.policies and not used.covers(granted)
        paused = session.bind_failures >= RETRY_LIMIT
        if not paused and len(own) < session.claim and (prior or fair):
            found.append((share, session.order, session))
    return [session for _, _, session in sorted(found, key=lambda entry: entry[:2])]


def on_node(state: State, node: Node) -> list[Executor]:
    return [executor for executor in state.executors.values() if executor.node == node.name]


def has_room(state: State, node: Node, session: Session) -> bool:
    """Whether the node has room. Flame would also use a lost node, and wait."""
    used = session.resreq
    for executor in on_node(state, node):
        used = used.plus(executor.resreq)
    return node.state == pb.Ready and ("drf" not in state.policies or node.capacity.covers(used))
