"""The runs of rlflame on a cluster: which of them live, and the removal of those that are dead.

A run keeps a lease that changes every few seconds, so a reader that looks long enough knows,
whatever the clocks of the machines say. A run that is not certain to be dead is left alone.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlflame.errors import FleetError
from rlflame.terminal_text import format_count

from .. import object_cache
from ..client import FlameClient, remove_run
from ..session_starter import PREFIX
from .cluster_snapshot import ClusterSession, ClusterSnapshot
from .findings import Check, CheckTimeouts, Finding

CLEAN_COMMAND = "rlflame cluster-check --clean"
_POLL_INTERVAL_S = 2.0
_MAX_FOREIGN = 4
#: The description of our applications; another with a like name is not ours.
_DESCRIPTION = "rlflame"
RunState = Literal["alive", "dead", "unknown"]
_STATE_NOUNS: dict[RunState, str] = {
    "alive": "live run",
    "dead": "dead run",
    "unknown": "doubtful run",
}
ProcessState = Literal["driver", "gone", "doubtful"]


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """The part of one run on the cluster; a run that installs has two applications."""

    name: str
    applications: tuple[str, ...]
    sessions: tuple[ClusterSession, ...]


@dataclass(frozen=True, slots=True)
class ClusterRunStatus:
    run: ClusterRun
    state: RunState
    reason: str
    #: The beat of its lease when that was concluded.
    beat: int | None = None


def find_runs(snapshot: ClusterSnapshot) -> list[ClusterRun]:
    names: dict[str, list[str]] = {}
    for application in snapshot.applications:
        if application.name.startswith(PREFIX) and application.description == _DESCRIPTION:
            names.setdefault(application.name.removesuffix("-i"), []).append(application.name)
    return [
        ClusterRun(
            name,
            tuple(sorted(applications)),
            tuple(session for session in snapshot.sessions if session.application in applications),
        )
        for name, applications in sorted(names.items())
    ]


def find_foreign_sessions(snapshot: ClusterSnapshot) -> list[ClusterSession]:
    """Open sessions of other programs."""
    run_session_ids = {session.id for run in find_runs(snapshot) for session in run.sessions}
    return [session for session in snapshot.sessions if session.id not in run_session_ids]


class RunLeases:
    """The leases of runs in the configured cache."""

    def read(self, run: str) -> dict[str, Any] | None:
        return object_cache.read_lease(object_cache.make_lease_key(run))

    def close(self, run: str, contents: dict[str, Any]) -> None:
        """Tell workers that still compute for a dead run to give up; its beat stays as it is."""
        key = object_cache.make_lease_key(run)
        object_cache.write_lease(key, {**contents, "closing": True})


def check_process(pid: int) -> ProcessState:
    """What this machine knows of a driver by its number, which may be another process's by now."""
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
    # A folder of that name, as a clone has, says nothing of what its interpreter runs.
    is_rlflame = any(argument.rpartition(b"/")[2] == b"rlflame" for argument in arguments)
    return "driver" if is_rlflame and not is_other else "doubtful"


class RunScan:
    """Begins with the first snapshot, and is settled once each run is known to live or not."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        leases: RunLeases,
        timeouts: CheckTimeouts,
        host: str = "",
        find_process_state: Callable[[int], ProcessState] = check_process,
    ) -> None:
        self._leases = leases
        self._timeouts = timeouts
        self._started_s = timeouts.clock()
        self._statuses: dict[str, ClusterRunStatus] = {}
        self._first_leases: dict[str, dict[str, Any] | None] = {}
        #: The runs that are not settled, and when each is dead if it has not moved.
        self._undecided: dict[ClusterRun, float] = {}
        #: The processes of drivers, for users.
        self._locations: dict[str, str] = {}
        self._runs = find_runs(snapshot)
        for run in self._runs:
            self._undecided[run] = self._started_s + timeouts.lease_s
            contents = self._first_leases[run.name] = self._read_lease(run)
            if contents is None:
                continue
            pid, location = contents["pid"], f"process {contents['pid']} on {contents['host']}"
            is_local = contents["host"] == (host or socket.gethostname())
            process_state = find_process_state(int(pid)) if is_local else "doubtful"
            if process_state == "driver":
                self._settle_run(run, "alive", f"its process {pid} on this machine lives")
            elif process_state == "gone":
                self._undecided[run] = self._started_s + min(timeouts.gone_s, timeouts.lease_s)
                location += ", which is gone"
            self._locations[run.name] = location

    def _read_lease(self, run: ClusterRun) -> dict[str, Any] | None:
        try:
            return self._leases.read(run.name)
        except FleetError as error:
            self._settle_run(run, "unknown", f"its lease cannot be read: {error.message}")
            return None

    def _settle_run(self, run: ClusterRun, state: RunState, reason: str) -> None:
        beat = (self._first_leases.get(run.name) or {}).get("beat")
        self._statuses[run.name] = ClusterRunStatus(run, state, reason, beat)
        del self._undecided[run]

    def settle(
        self, take_snapshot: Callable[[], ClusterSnapshot], report_progress: Callable[[str], None]
    ) -> list[ClusterRunStatus]:
        """Wait until every live run has shown it, or long enough to say that the rest are dead."""
        self._compare_leases()
        if self._undecided:
            longest_s = max(self._undecided.values()) - self._timeouts.clock()
            report_progress(
                f"waiting up to {max(0.0, longest_s):.0f} s to see whether "
                f"{format_count(len(self._undecided), 'run')} of rlflame on the cluster still "
                "live; a live one mostly shows it within 5 s"
            )
        while self._undecided:
            left_s = min(self._undecided.values()) - self._timeouts.clock()
            if left_s > 0.0:
                self._timeouts.sleep(min(_POLL_INTERVAL_S, left_s))
                self._compare_leases()
                continue
            last = {run.name: run for run in find_runs(take_snapshot())}
            for run, due_s in list(self._undecided.items()):
                if due_s <= self._timeouts.clock():
                    self._conclude(run, last.get(run.name))
        return [self._statuses[run.name] for run in self._runs]

    def _compare_leases(self) -> None:
        for run in list(self._undecided):
            before, now = self._first_leases[run.name], self._read_lease(run)
            if now and (before is None or now["beat"] != before["beat"]):
                self._settle_run(run, "alive", f"its lease moves, beat {now['beat']}")

    def _conclude(self, run: ClusterRun, now: ClusterRun | None) -> None:
        stood_s = self._timeouts.clock() - self._started_s
        if now is None:
            self._settle_run(run, "alive", "it has just ended by itself")
        elif location := self._locations.get(run.name):
            self._settle_run(run, "dead", f"no beat for {stood_s:.0f} s; it was {location}")
        elif [session.counts for session in now.sessions] != [s.counts for s in run.sessions]:
            self._settle_run(run, "unknown", "it has no lease, but its tasks move")
        elif any(session.running for session in now.sessions):
            self._settle_run(run, "unknown", "it has no lease, but tasks of it run")
        else:
            reason = f"it has no lease, and nothing moved for {stood_s:.0f} s"
            self._settle_run(run, "dead", reason)


def check_sessions(statuses: Sequence[ClusterRunStatus], snapshot: ClusterSnapshot) -> Finding:
    """Whose sessions are open."""
    foreign = find_foreign_sessions(snapshot)
    check = Check("sessions", runs=[], others=[session.id for session in foreign])
    notes = []
    for status in statuses:
        name, session_ids = status.run.name, [session.id for session in status.run.sessions]
        fact = {"name": name, "state": status.state, "why": status.reason}
        check.facts["runs"].append({**fact, "sessions": session_ids})
        notes.append(f"{name} ({status.state}): {status.reason}")
    notes += [
        f"{session.id}: {session.pending} waiting, {session.running} running, of others"
        for session in foreign[:_MAX_FOREIGN]
    ]
    if len(foreign) > _MAX_FOREIGN:
        notes.append(f"and {len(foreign) - _MAX_FOREIGN} more of others")
    counts = Counter(status.state for status in statuses)
    parts = [
        f"{format_count(counts[state], noun)} of rlflame"
        for state, noun in _STATE_NOUNS.items()
        if counts[state]
    ]
    parts += [f"{format_count(len(foreign), 'session')} of others"] if foreign else []
    seen = ", ".join(parts) or "none open"
    if counts["dead"]:
        seen += "; dead ones take their share from others"
        return check.make_warning(seen, CLEAN_COMMAND, notes=notes)
    return check.make_ok(seen, notes=notes)


def remove_dead_runs(
    client: FlameClient,
    statuses: Sequence[ClusterRunStatus],
    leases: RunLeases,
    snapshot: ClusterSnapshot,
    timeouts: CheckTimeouts,
) -> Finding:
    """Remove dead runs, and say of every other why it was left alone."""
    removed, spared, failures = [], [], []
    for status in statuses:
        run, name = status.run, status.run.name
        if status.state != "dead":
            spared.append(f"left alone: {name}, {status.reason}")
            continue
        try:
            contents = leases.read(name)
            if contents is not None and contents["beat"] != status.beat:
                spared.append(f"left alone: {name}, its lease moves again")
                continue
            if contents is not None:
                leases.close(name, contents)
            clock, sleep = timeouts.clock, timeouts.sleep
            problem = remove_run(client, name, timeouts.closing_s, clock=clock, sleep=sleep)
        except FleetError as error:
            problem = error.message.rstrip(".")
        if problem:
            failures.append(f"not removed: {name}, {problem}{_format_nodes(run, snapshot)}")
            continue
        removed.append(
            f"removed: {name}, {format_count(len(run.sessions), 'open session')}, "
            f"{format_count(len(run.applications), 'application')} and its objects; {status.reason}"
        )
    check = Check("cleaning", removed=removed, left_alone=spared, not_removed=failures)
    notes = [*removed, *spared, *failures]
    if not statuses:
        return check.make_ok("nothing of rlflame was there")
    seen = f"{format_count(len(removed), 'dead run')} removed, {len(spared)} left alone"
    if not failures:
        return check.make_ok(seen, notes=notes)
    return check.make_failure(
        f"{seen}, {format_count(len(failures), 'dead run')} could not be removed",
        "an executor that never finishes its task keeps a session open, and an object cache that "
        f"hangs keeps objects: see their checks, free the node or restart it; then {CLEAN_COMMAND}",
        notes=notes,
    )


def _format_nodes(run: ClusterRun, snapshot: ClusterSnapshot) -> str:
    session_ids = {session.id for session in run.sessions}
    nodes = {executor.node for executor in snapshot.executors if executor.session in session_ids}
    return f" (on {', '.join(sorted(nodes))})" if nodes else ""
