"""Taking things off a cluster: what dead runs left there, and what a probe has opened.

What is not certain to be dead is left alone. Must not know: how runs are told to be dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlflame.errors import FleetError
from rlflame.fleet.flame.check.findings import Finding, Pace, brief, failed, ok
from rlflame.fleet.flame.check.snapshot import Look
from rlflame.fleet.flame.check.stale_runs import CLEAN, Fate, Leases, Run
from rlflame.fleet.flame.client import Cluster
from rlflame.text import format_count

_CLOSE_EVERY_S = 0.5
_BUSY = (
    "an executor that never finishes its task keeps a session open: see executors above or below, "
    f"free the node, then {CLEAN}"
)
_NO_CACHE = f"see the check of the object cache, restart it if it hangs, then {CLEAN}"


def withdraw(
    cluster: Cluster, sessions: Sequence[str], applications: Sequence[str], pace: Pace
) -> str:
    """Close and unregister, asking again for a while; what could not be done, in words."""
    end_s = pace.clock() + pace.closing_s
    steps: list[tuple[Callable[[str], None], Callable[[Cluster, str], bool], str]]
    steps = [(cluster.close_session, _is_open, name) for name in sessions]
    steps += [(cluster.unregister, _is_registered, name) for name in applications]
    for step, is_there, name in steps:
        while True:
            try:
                step(name)
                break
            except FleetError as error:
                if not is_there(cluster, name):
                    break
                if pace.clock() >= end_s:
                    return error.message.rstrip(".")
            pace.pause(_CLOSE_EVERY_S)
    return ""


def _is_open(cluster: Cluster, session_id: str) -> bool:
    return any(found.id == session_id and found.state == 0 for found in cluster.sessions())


def _is_registered(cluster: Cluster, name: str) -> bool:
    return cluster.application(name) is not None


def clean(
    cluster: Cluster, fates: Sequence[Fate], leases: Leases, look: Look, pace: Pace
) -> Finding:
    """Remove dead runs, and say of every other why it was left alone."""
    removed, kept, stubborn = [], [], []
    fixes: dict[str, None] = {}
    for fate in fates:
        name, run = fate.run.name, fate.run
        if fate.state != "dead":
            kept.append(f"left alone: {name}, {fate.why}")
            continue
        try:
            problem = _bury(cluster, fate, leases, pace)
        except _Alive:
            kept.append(f"left alone: {name}, its lease moves again")
            continue
        except _Kept as error:
            stubborn.append(f"not removed: {name}, {error.message}")
            fixes.setdefault(_NO_CACHE)
            continue
        except FleetError as error:
            problem = error.message.rstrip(".")
        if problem:
            fixes.setdefault(_BUSY)
            stubborn.append(f"not removed: {name}, {problem}{_where(run, look)}")
            continue
        removed.append(
            f"removed: {name}, {format_count(len(run.sessions), 'open session')}, "
            f"{format_count(len(run.applications), 'application')} and its objects; {fate.why}"
        )
    facts: dict[str, Any] = {"removed": removed, "left_alone": kept, "not_removed": stubborn}
    seen = (
        f"{format_count(len(removed), 'dead run')} removed, {len(kept)} left alone"
        if fates
        else "nothing of rlflame was there"
    )
    notes = [*removed, *kept, *stubborn]
    if stubborn:
        return failed(
            "cleaning",
            f"{seen}, {format_count(len(stubborn), 'dead run')} could not be removed",
            *fixes,
            notes=notes,
            **facts,
        )
    return ok("cleaning", seen, notes=notes, **facts)


class _Alive(Exception):
    """It has moved after all."""


class _Kept(FleetError):
    """The object cache stands in the way."""


def _bury(cluster: Cluster, fate: Fate, leases: Leases, pace: Pace) -> str:
    run = fate.run
    found = leases.read(run.name)
    if found is not None:
        if found["beat"] != fate.beat:
            raise _Alive
        leases.end(run.name, found)  # workers that still toil for it look there, and give up
    problem = withdraw(cluster, [session.id for session in run.sessions], [], pace)
    if problem:
        return problem
    try:
        # Results lie under the application's name, everything else under the run's. While an
        # application is registered the next cleaning finds the run; its objects tell nobody.
        for name in (run.name, f"{run.name}-i"):
            cluster.delete(f"{name}/*")
    except FleetError as error:
        raise _Kept(
            f"the object cache does not delete its objects ({brief(error.message)}); its "
            "applications stay registered, so that the next cleaning finds them"
        ) from error
    return withdraw(cluster, [], run.applications, pace)


def _where(run: Run, look: Look) -> str:
    ours = {session.id for session in run.sessions}
    found = sorted({executor.node for executor in look.executors if executor.session in ours})
    return f" (on {', '.join(found)})" if found else ""
