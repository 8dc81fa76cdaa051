"""Finds rlflame's runs on a cluster, and removes those that are dead.

A live run renews its lease, an object in the cache, every few seconds. A reader watches the lease
for changes, so the machines' clocks need not agree. Only runs that are certainly dead are removed.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlflame.errors import FleetError
from rlflame.terminal_text import format_count

from .. import object_cache
from ..client import FlameClient, remove_run
from ..session_starter import PREFIX
from .cluster_snapshot import ClusterSession, ClusterSnapshot
from .findings import CheckTimeouts, Finding

CLEAN_COMMAND = "rlflame cluster-check --clean"
_POLL_INTERVAL_S = 2.0
#: The description of rlflame's applications. Other applications may have the same name prefix.
_DESCRIPTION = "rlflame"
RunState = Literal["alive", "dead", "unknown"]
ProcessState = Literal["driver", "gone", "doubtful"]


@dataclass(slots=True)
class ClusterRun:
    """The sessions and the lease of one run, and whether the run is alive."""

    name: str
    sessions: list[ClusterSession]
    #: The content of the lease when it was first read.
    lease: dict[str, Any] | None = None
    #: The time at which the run counts as dead, unless its lease has changed by then.
    due_s: float = 0.0
    #: None while undecided.
    state: RunState | None = None
    reason: str = ""

    def settle(self, state: RunState, reason: str) -> None:
        self.state, self.reason = state, reason


def find_runs(snapshot: ClusterSnapshot) -> list[ClusterRun]:
    applications = {
        application.name
        for application in snapshot.applications
        if application.name.startswith(PREFIX) and application.description == _DESCRIPTION
    }
    # A run that installs packages has two applications.
    names = sorted({application.removesuffix("-i") for application in applications})
    runs = {name: ClusterRun(name, []) for name in names}
    for session in snapshot.sessions:
        if session.application in applications:
            runs[session.application.removesuffix("-i")].sessions.append(session)
    return list(runs.values())


def check_process(lease: Mapping[str, Any]) -> ProcessState:
    """Look for a run's driver on this machine. Its process ID may have been reused."""
    pid = int(lease["pid"])
    if lease["host"] != socket.gethostname():
        return "doubtful"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "doubtful"
    is_other = pid == os.getpid() or b"cluster-check" in arguments
    # Only the last part of a path counts, because a folder may also be called rlflame.
    is_rlflame = any(argument.rpartition(b"/")[2] == b"rlflame" for argument in arguments)
    return "driver" if is_rlflame and not is_other else "doubtful"


class RunScan:
    """Decides which runs in a snapshot are alive."""

    def __init__(self, snapshot: ClusterSnapshot, timeouts: CheckTimeouts) -> None:
        self._started_s = time.monotonic()
        self._runs = find_runs(snapshot)
        for run in self._runs:
            run.lease = _read_lease(run)
            process_state = check_process(run.lease) if run.lease else "doubtful"
            if process_state == "driver":
                run.settle("alive", "its process is running on this machine")
            wait_s = timeouts.gone_s if process_state == "gone" else timeouts.lease_s
            run.due_s = self._started_s + min(wait_s, timeouts.lease_s)

    def settle(
        self, take_snapshot: Callable[[], ClusterSnapshot], report_progress: Callable[[str], None]
    ) -> list[ClusterRun]:
        """Decide the state of every run, waiting for lease updates; return the runs."""
        self._compare_leases()
        if unclear_runs := self._list_undecided():
            longest_s = max(run.due_s for run in unclear_runs) - time.monotonic()
            report_progress(
                f"waiting up to {max(0.0, longest_s):.0f} s for the lease updates of "
                f"{format_count(len(unclear_runs), 'run')} of rlflame on the cluster; a live run "
                "usually renews its lease within 5 s"
            )
        while unclear_runs := self._list_undecided():
            left_s = min(run.due_s for run in unclear_runs) - time.monotonic()
            if left_s > 0.0:
                time.sleep(min(_POLL_INTERVAL_S, left_s))
                self._compare_leases()
                continue
            last = {run.name: run for run in find_runs(take_snapshot())}
            for run in unclear_runs:
                if run.due_s <= time.monotonic():
                    self._conclude(run, last.get(run.name))
        return self._runs

    def _list_undecided(self) -> list[ClusterRun]:
        return [run for run in self._runs if run.state is None]

    def _compare_leases(self) -> None:
        for run in self._list_undecided():
            lease = _read_lease(run)
            if lease and (run.lease is None or lease["beat"] != run.lease["beat"]):
                run.settle("alive", f"its lease was renewed (beat {lease['beat']})")

    def _conclude(self, run: ClusterRun, now: ClusterRun | None) -> None:
        stood_s = time.monotonic() - self._started_s
        if now is None:
            run.settle("alive", "it ended during the check")
        elif run.lease:
            location = f"process {run.lease['pid']} on {run.lease['host']}"
            run.settle("dead", f"lease not renewed for {stood_s:.0f} s; its driver was {location}")
        elif now.sessions != run.sessions or any(session.running for session in now.sessions):
            run.settle("unknown", "it has no lease, but its sessions are active")
        else:
            run.settle("dead", f"it has no lease and was inactive for {stood_s:.0f} s")


def _read_lease(run: ClusterRun) -> dict[str, Any] | None:
    try:
        return object_cache.read_lease(object_cache.make_lease_key(run.name))
    except FleetError as error:
        run.settle("unknown", f"its lease cannot be read: {error.message}")
        return None


def check_sessions(runs: Sequence[ClusterRun], snapshot: ClusterSnapshot) -> Finding:
    """Report the open sessions of rlflame's runs and of other applications."""
    session_ids = [session.id for run in find_runs(snapshot) for session in run.sessions]
    foreign = [session for session in snapshot.sessions if session.id not in session_ids]
    facts = {
        "runs": [{"name": run.name, "state": run.state, "why": run.reason} for run in runs],
        "others": [session.id for session in foreign],
    }
    notes = [f"{run.name} ({run.state}): {run.reason}" for run in runs]
    notes += [
        f"{session.id}: {session.pending} waiting, {session.running} running, another application"
        for session in foreign
    ]
    counts = Counter(run.state for run in runs)
    words = {"alive": "live"}
    parts = [format_count(n, f"{words.get(str(s), s)} run") for s, n in counts.items()]
    parts += [f"{format_count(len(foreign), 'session')} of other applications"] if foreign else []
    text = ", ".join(parts) or "none open"
    if not counts["dead"]:
        return Finding("sessions", "ok", text, (), tuple(notes), facts)
    text += "; dead runs occupy executors that others could use"
    return Finding("sessions", "warning", text, (CLEAN_COMMAND,), tuple(notes), facts)


def remove_dead_runs(client: FlameClient, runs: Sequence[ClusterRun], timeout_s: float) -> Finding:
    """Remove dead runs, and note why every other run was left alone."""
    removed_notes, kept_notes, failure_notes = [], [], []
    for run in runs:
        if run.state != "dead":
            kept_notes.append(f"left alone: {run.name}, {run.reason}")
            continue
        key = object_cache.make_lease_key(run.name)
        try:
            lease = object_cache.read_lease(key)
            if lease is not None and (run.lease is None or lease["beat"] != run.lease["beat"]):
                kept_notes.append(f"left alone: {run.name}, its lease is being renewed again")
                continue
            if lease is not None:
                # Tell the run's workers to give up. A changed beat would make the run look alive.
                object_cache.write_lease(key, {**lease, "closing": True})
            problem = remove_run(client, run.name, timeout_s)
        except FleetError as error:
            problem = error.message.rstrip(".")
        if problem:
            failure_notes.append(f"not removed: {run.name}, {problem}")
        else:
            removed_notes.append(f"removed: {run.name}; {run.reason}")
    facts = {"removed": removed_notes, "left_alone": kept_notes, "not_removed": failure_notes}
    notes = (*removed_notes, *kept_notes, *failure_notes)
    text = f"{format_count(len(removed_notes), 'dead run')} removed, {len(kept_notes)} left alone"
    if not failure_notes:
        return Finding("cleaning", "ok", text, (), notes, facts)
    text += f", {format_count(len(failure_notes), 'dead run')} could not be removed"
    fix = (
        "an executor that never finishes its task keeps a session open, and a hanging object cache "
        f"keeps objects: see their checks, free the node or restart the cache; then {CLEAN_COMMAND}"
    )
    return Finding("cleaning", "failed", text, (fix,), notes, facts)
