"""Runs of rlflame on a cluster: which of them live.

A run keeps a lease that changes every few seconds; who looks long enough knows, whatever the
clocks of the machines say. Must not know: what becomes of dead ones.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlflame.errors import FleetError
from rlflame.fleet.flame import lease
from rlflame.fleet.flame.check.findings import CheckTimeouts, Finding, make_ok, make_warning
from rlflame.fleet.flame.check.snapshot import ClusterSession, ClusterSnapshot
from rlflame.fleet.flame.client import FlameClient
from rlflame.fleet.flame.session_start import PREFIX
from rlflame.fleet.flame.timed_call import call_with_timeout
from rlflame.terminal_text import format_count

CLEAN_COMMAND = "rlflame cluster-check --clean"
_LEASE_S = 10.0
_POLL_INTERVAL_S = 2.0
#: What applications of ours are described as; another with a like name is none of ours.
_DESCRIPTION = "rlflame"
RunState = Literal["alive", "dead", "unknown"]
_STATE_NAMES: dict[RunState, str] = {
    "alive": "live run",
    "dead": "dead run",
    "unknown": "doubtful run",
}


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """What one run has on the cluster; a run that installs has two applications."""

    name: str
    applications: tuple[str, ...]
    sessions: tuple[ClusterSession, ...]


@dataclass(frozen=True, slots=True)
class ClusterRunStatus:
    run: ClusterRun
    state: RunState
    reason: str
    #: Where its lease stood when that was concluded.
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
    """Open sessions of others."""
    run_session_ids = {session.id for run in find_runs(snapshot) for session in run.sessions}
    return [session for session in snapshot.sessions if session.id not in run_session_ids]


class RunLeases:
    """The leases of a cluster's runs."""

    def __init__(self, client: FlameClient) -> None:
        self._client = client

    def read(self, run: str) -> dict[str, Any] | None:
        """What it says now, or None where there is none; FleetError where nobody can say."""
        endpoint, key = self._client.cache_endpoint, lease.make_key(run)
        contents = call_with_timeout(lambda: lease.read(endpoint, key), _LEASE_S, "lease")
        if contents is not None and not {"beat", "host", "pid"} <= contents.keys():
            raise FleetError("It is not of the kind that runs keep.")
        return contents

    def close(self, run: str, contents: dict[str, Any]) -> None:
        endpoint, key = self._client.cache_endpoint, lease.make_key(run)
        call_with_timeout(lambda: lease.close_lease(endpoint, key, contents), _LEASE_S, "lease")


ProcessState = Literal["driver", "gone", "doubtful"]


def check_process(pid: int) -> ProcessState:
    """What this machine knows of a driver by its number, which may be another's by now."""
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


@dataclass
class RunScan:
    """Begun at the first look, and settled once every run has shown whether it lives."""

    snapshot: ClusterSnapshot
    leases: RunLeases
    timeouts: CheckTimeouts
    host: str = field(default_factory=socket.gethostname)
    find_process_state: Callable[[int], ProcessState] = check_process
    _first_leases: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    _statuses: dict[str, ClusterRunStatus] = field(default_factory=dict)
    #: Runs whose process on this machine is no more.
    _gone: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.started_s = self.timeouts.clock()
        self.runs = find_runs(self.snapshot)
        for run in self.runs:
            try:
                contents = self._first_leases[run.name] = self.leases.read(run.name)
            except FleetError as error:
                self._set_status(run, "unknown", f"its lease cannot be read: {error.message}")
                continue
            if contents is None or contents["host"] != self.host:
                continue
            process_state = self.find_process_state(int(contents["pid"]))
            if process_state == "driver":
                self._set_status(
                    run, "alive", f"its process {contents['pid']} on this machine lives"
                )
            elif process_state == "gone":
                self._gone.add(run.name)

    def _set_status(self, run: ClusterRun, state: RunState, reason: str) -> None:
        beat = (self._first_leases.get(run.name) or {}).get("beat")
        self._statuses[run.name] = ClusterRunStatus(run, state, reason, beat)

    @property
    def undecided(self) -> list[ClusterRun]:
        """Runs of which nothing is known yet."""
        return [run for run in self.runs if run.name not in self._statuses]

    def settle(
        self, take_snapshot: Callable[[], ClusterSnapshot], report_progress: Callable[[str], None]
    ) -> list[ClusterRunStatus]:
        """Wait until all that live have shown it, or long enough to say that the rest are dead."""
        self._read_leases()
        if self.undecided:
            longest_s = (
                max(self._compute_due_s(run) for run in self.undecided) - self.timeouts.clock()
            )
            report_progress(
                f"waiting up to {max(0.0, longest_s):.0f} s to see whether "
                f"{format_count(len(self.undecided), 'run')} of rlflame on the cluster still live; "
                "a live one mostly shows it within 5 s"
            )
        while self.undecided:
            now_s = self.timeouts.clock()
            due = [run for run in self.undecided if self._compute_due_s(run) <= now_s]
            if due:
                last = {run.name: run for run in find_runs(take_snapshot())}
                for run in due:
                    self._conclude(run, last.get(run.name))
                continue
            next_s = min(self._compute_due_s(run) for run in self.undecided)
            self.timeouts.sleep(min(_POLL_INTERVAL_S, next_s - now_s))
            self._read_leases()
        return [self._statuses[run.name] for run in self.runs]

    def _compute_due_s(self, run: ClusterRun) -> float:
        """When a run that has not moved by then is dead."""
        gone = run.name in self._gone
        patience_s = (
            min(self.timeouts.gone_s, self.timeouts.lease_s) if gone else self.timeouts.lease_s
        )
        return self.started_s + patience_s

    def _read_leases(self) -> None:
        for run in self.undecided:
            try:
                self._compare(run, self.leases.read(run.name))
            except FleetError as error:
                self._set_status(run, "unknown", f"its lease cannot be read: {error.message}")

    def _compare(self, run: ClusterRun, now: dict[str, Any] | None) -> None:
        before = self._first_leases[run.name]
        if now and (before is None or now["beat"] != before["beat"]):
            self._set_status(run, "alive", f"its lease moves, beat {now['beat']}")

    def _conclude(self, run: ClusterRun, now: ClusterRun | None) -> None:
        stood_s = self.timeouts.clock() - self.started_s
        contents = self._first_leases[run.name]
        if now is None:
            self._set_status(run, "alive", "it has just ended by itself")
        elif contents is not None:
            location = f"process {contents['pid']} on {contents['host']}"
            location += ", which is gone" if run.name in self._gone else ""
            self._set_status(run, "dead", f"no beat for {stood_s:.0f} s; it was {location}")
        elif [session.counts for session in now.sessions] != [s.counts for s in run.sessions]:
            self._set_status(run, "unknown", "it has no lease, but its tasks move")
        elif any(session.running for session in now.sessions):
            self._set_status(run, "unknown", "it has no lease, but tasks of it run")
        else:
            self._set_status(run, "dead", f"it has no lease, and nothing moved for {stood_s:.0f} s")


def make_finding(statuses: Sequence[ClusterRunStatus], snapshot: ClusterSnapshot) -> Finding:
    """Whose sessions are open."""
    foreign_sessions = find_foreign_sessions(snapshot)
    states = {
        state: [status for status in statuses if status.state == state] for state in _STATE_NAMES
    }
    parts = [
        f"{format_count(len(states[s]), word)} of rlflame"
        for s, word in _STATE_NAMES.items()
        if states[s]
    ]
    parts += (
        [f"{format_count(len(foreign_sessions), 'session')} of others"] if foreign_sessions else []
    )
    notes = [f"{status.run.name} ({status.state}): {status.reason}" for status in statuses]
    notes += [
        f"{session.id}: {session.pending} waiting, {session.running} running, of others"
        for session in foreign_sessions[:4]
    ] + ([f"and {len(foreign_sessions) - 4} more of others"] if len(foreign_sessions) > 4 else [])
    facts: dict[str, Any] = {
        "runs": [
            {
                "name": status.run.name,
                "state": status.state,
                "why": status.reason,
                "sessions": [session.id for session in status.run.sessions],
            }
            for status in statuses
        ],
        "others": [session.id for session in foreign_sessions],
    }
    seen = ", ".join(parts) or "none open"
    if not states["dead"]:
        return make_ok("sessions", seen, notes=notes, **facts)
    return make_warning(
        "sessions",
        f"{seen}; dead ones take their share from others",
        CLEAN_COMMAND,
        notes=notes,
        **facts,
    )
