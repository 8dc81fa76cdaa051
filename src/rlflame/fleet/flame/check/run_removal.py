"""Taking things off a cluster: what dead runs left there, and what a probe has opened.

What is not certain to be dead is left alone. Must not know: how runs are told to be dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlflame.errors import FleetError
from rlflame.fleet.flame.check.findings import (
    CheckTimeouts,
    Finding,
    make_failure,
    make_ok,
    shorten_error,
)
from rlflame.fleet.flame.check.snapshot import ClusterSnapshot
from rlflame.fleet.flame.check.stale_runs import (
    CLEAN_COMMAND,
    ClusterRun,
    ClusterRunStatus,
    RunLeases,
)
from rlflame.fleet.flame.client import FlameClient
from rlflame.terminal_text import format_count

_RETRY_INTERVAL_S = 0.5
_BUSY_FIX = (
    "an executor that never finishes its task keeps a session open: see executors above or below, "
    f"free the node, then {CLEAN_COMMAND}"
)
_NO_CACHE_FIX = f"see the check of the object cache, restart it if it hangs, then {CLEAN_COMMAND}"


def close_and_unregister(
    client: FlameClient,
    sessions: Sequence[str],
    applications: Sequence[str],
    timeouts: CheckTimeouts,
) -> str:
    """Close and unregister, asking again for a while; what could not be done, in words."""
    deadline_s = timeouts.clock() + timeouts.closing_s
    steps: list[tuple[Callable[[str], None], Callable[[FlameClient, str], bool], str]]
    steps = [(client.close_session, _is_open, name) for name in sessions]
    steps += [(client.unregister_application, _is_registered, name) for name in applications]
    for step, exists, name in steps:
        while True:
            try:
                step(name)
                break
            except FleetError as error:
                if not exists(client, name):
                    break
                if timeouts.clock() >= deadline_s:
                    return error.message.rstrip(".")
            timeouts.sleep(_RETRY_INTERVAL_S)
    return ""


def _is_open(client: FlameClient, session_id: str) -> bool:
    return any(
        session.id == session_id and session.state == 0 for session in client.list_sessions()
    )


def _is_registered(client: FlameClient, name: str) -> bool:
    return client.get_application(name) is not None


def remove_dead_runs(
    client: FlameClient,
    statuses: Sequence[ClusterRunStatus],
    leases: RunLeases,
    snapshot: ClusterSnapshot,
    timeouts: CheckTimeouts,
) -> Finding:
    """Remove dead runs, and say of every other why it was left alone."""
    removed, spared, failures = [], [], []
    fixes: dict[str, None] = {}
    for status in statuses:
        name, run = status.run.name, status.run
        if status.state != "dead":
            spared.append(f"left alone: {name}, {status.reason}")
            continue
        try:
            problem = _remove_run(client, status, leases, timeouts)
        except _RunAliveError:
            spared.append(f"left alone: {name}, its lease moves again")
            continue
        except _ObjectsKeptError as error:
            failures.append(f"not removed: {name}, {error.message}")
            fixes.setdefault(_NO_CACHE_FIX)
            continue
        except FleetError as error:
            problem = error.message.rstrip(".")
        if problem:
            fixes.setdefault(_BUSY_FIX)
            failures.append(f"not removed: {name}, {problem}{_format_nodes(run, snapshot)}")
            continue
        removed.append(
            f"removed: {name}, {format_count(len(run.sessions), 'open session')}, "
            f"{format_count(len(run.applications), 'application')} and its objects; {status.reason}"
        )
    facts: dict[str, Any] = {"removed": removed, "left_alone": spared, "not_removed": failures}
    seen = (
        f"{format_count(len(removed), 'dead run')} removed, {len(spared)} left alone"
        if statuses
        else "nothing of rlflame was there"
    )
    notes = [*removed, *spared, *failures]
    if failures:
        return make_failure(
            "cleaning",
            f"{seen}, {format_count(len(failures), 'dead run')} could not be removed",
            *fixes,
            notes=notes,
            **facts,
        )
    return make_ok("cleaning", seen, notes=notes, **facts)


class _RunAliveError(Exception):
    """It has moved after all."""


class _ObjectsKeptError(FleetError):
    """The object cache stands in the way."""


def _remove_run(
    client: FlameClient, status: ClusterRunStatus, leases: RunLeases, timeouts: CheckTimeouts
) -> str:
    run = status.run
    contents = leases.read(run.name)
    if contents is not None:
        if contents["beat"] != status.beat:
            raise _RunAliveError
        leases.close(run.name, contents)  # workers that still toil for it look there, and give up
    problem = close_and_unregister(client, [session.id for session in run.sessions], [], timeouts)
    if problem:
        return problem
    try:
        # Results lie under the application's name, everything else under the run's. While an
        # application is registered the next cleaning finds the run; its objects tell nobody.
        for name in (run.name, f"{run.name}-i"):
            client.delete_objects(f"{name}/*")
    except FleetError as error:
        raise _ObjectsKeptError(
            f"the object cache does not delete its objects ({shorten_error(error.message)}); its "
            "applications stay registered, so that the next cleaning finds them"
        ) from error
    return close_and_unregister(client, [], run.applications, timeouts)


def _format_nodes(run: ClusterRun, snapshot: ClusterSnapshot) -> str:
    session_ids = {session.id for session in run.sessions}
    nodes = sorted(
        {executor.node for executor in snapshot.executors if executor.session in session_ids}
    )
    return f" (on {', '.join(nodes)})" if nodes else ""
