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
from rlflame.fleet.flame.check.findings import Finding, Pace, ok, warning
from rlflame.fleet.flame.check.snapshot import Look, Session
from rlflame.fleet.flame.client import Cluster
from rlflame.fleet.flame.session_start import PREFIX
from rlflame.fleet.flame.timeouts import bounded
from rlflame.text import format_count

CLEAN = "rlflame cluster-check --clean"
_LEASE_S = 10.0
_LOOK_EVERY_S = 2.0
#: What applications of ours are described as; another with a like name is none of ours.
_DESCRIPTION = "rlflame"
State = Literal["alive", "dead", "unknown"]
_WORDS: dict[State, str] = {"alive": "live run", "dead": "dead run", "unknown": "doubtful run"}


@dataclass(frozen=True, slots=True)
class Run:
    """What one run has on the cluster; a run that installs has two applications."""

    name: str
    applications: tuple[str, ...]
    sessions: tuple[Session, ...]


@dataclass(frozen=True, slots=True)
class Fate:
    run: Run
    state: State
    why: str
    #: Where its lease stood when that was concluded.
    beat: int | None = None


def runs(look: Look) -> list[Run]:
    names: dict[str, list[str]] = {}
    for application in look.applications:
        if application.name.startswith(PREFIX) and application.description == _DESCRIPTION:
            names.setdefault(application.name.removesuffix("-i"), []).append(application.name)
    return [
        Run(
            name,
            tuple(sorted(found)),
            tuple(session for session in look.sessions if session.application in found),
        )
        for name, found in sorted(names.items())
    ]


def foreign(look: Look) -> list[Session]:
    """Open sessions of others."""
    ours = {session.id for run in runs(look) for session in run.sessions}
    return [session for session in look.sessions if session.id not in ours]


class Leases:
    """The leases of a cluster's runs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def read(self, run: str) -> dict[str, Any] | None:
        """What it says now, or None where there is none; FleetError where nobody can say."""
        endpoint, key = self._cluster.cache_endpoint, lease.key_of(run)
        found = bounded(lambda: lease.read(endpoint, key), _LEASE_S, "lease")
        if found is not None and not {"beat", "host", "pid"} <= found.keys():
            raise FleetError("It is not of the kind that runs keep.")
        return found

    def end(self, run: str, found: dict[str, Any]) -> None:
        endpoint, key = self._cluster.cache_endpoint, lease.key_of(run)
        bounded(lambda: lease.end_for(endpoint, key, found), _LEASE_S, "lease")


Process = Literal["driver", "gone", "doubtful"]


def process(pid: int) -> Process:
    """What this machine knows of a driver by its number, which may be another's by now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "doubtful"
    is_other = pid == os.getpid() or b"cluster-check" in words
    # A folder of that name, as a clone has, says nothing of what its interpreter runs.
    is_ours = any(word.rpartition(b"/")[2] == b"rlflame" for word in words)
    return "driver" if is_ours and not is_other else "doubtful"


@dataclass
class Census:
    """Begun at the first look, and settled once every run has shown whether it lives."""

    look: Look
    leases: Leases
    pace: Pace
    host: str = field(default_factory=socket.gethostname)
    process: Callable[[int], Process] = process
    _first: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    _fates: dict[str, Fate] = field(default_factory=dict)
    #: Runs whose process on this machine is no more.
    _gone: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.began_s = self.pace.clock()
        self.runs = runs(self.look)
        for run in self.runs:
            try:
                found = self._first[run.name] = self.leases.read(run.name)
            except FleetError as error:
                self._say(run, "unknown", f"its lease cannot be read: {error.message}")
                continue
            if found is None or found["host"] != self.host:
                continue
            known = self.process(int(found["pid"]))
            if known == "driver":
                self._say(run, "alive", f"its process {found['pid']} on this machine lives")
            elif known == "gone":
                self._gone.add(run.name)

    def _say(self, run: Run, state: State, why: str) -> None:
        beat = (self._first.get(run.name) or {}).get("beat")
        self._fates[run.name] = Fate(run, state, why, beat)

    @property
    def open(self) -> list[Run]:
        """Runs of which nothing is known yet."""
        return [run for run in self.runs if run.name not in self._fates]

    def settle(self, again: Callable[[], Look], tell: Callable[[str], None]) -> list[Fate]:
        """Wait until all that live have shown it, or long enough to say that the rest are dead."""
        self._ask()
        if self.open:
            longest_s = max(self._due_s(run) for run in self.open) - self.pace.clock()
            tell(
                f"waiting up to {max(0.0, longest_s):.0f} s to see whether "
                f"{format_count(len(self.open), 'run')} of rlflame on the cluster still live; "
                "a live one mostly shows it within 5 s"
            )
        while self.open:
            now_s = self.pace.clock()
            due = [run for run in self.open if self._due_s(run) <= now_s]
            if due:
                last = {run.name: run for run in runs(again())}
                for run in due:
                    self._conclude(run, last.get(run.name))
                continue
            next_s = min(self._due_s(run) for run in self.open)
            self.pace.pause(min(_LOOK_EVERY_S, next_s - now_s))
            self._ask()
        return [self._fates[run.name] for run in self.runs]

    def _due_s(self, run: Run) -> float:
        """When a run that has not moved by then is dead."""
        gone = run.name in self._gone
        stands_s = min(self.pace.gone_s, self.pace.lease_s) if gone else self.pace.lease_s
        return self.began_s + stands_s

    def _ask(self) -> None:
        for run in self.open:
            try:
                self._compare(run, self.leases.read(run.name))
            except FleetError as error:
                self._say(run, "unknown", f"its lease cannot be read: {error.message}")

    def _compare(self, run: Run, now: dict[str, Any] | None) -> None:
        before = self._first[run.name]
        if now and (before is None or now["beat"] != before["beat"]):
            self._say(run, "alive", f"its lease moves, beat {now['beat']}")

    def _conclude(self, run: Run, now: Run | None) -> None:
        stood_s = self.pace.clock() - self.began_s
        found = self._first[run.name]
        if now is None:
            self._say(run, "alive", "it has just ended by itself")
        elif found is not None:
            where = f"process {found['pid']} on {found['host']}"
            where += ", which is gone" if run.name in self._gone else ""
            self._say(run, "dead", f"no beat for {stood_s:.0f} s; it was {where}")
        elif [session.counts for session in now.sessions] != [s.counts for s in run.sessions]:
            self._say(run, "unknown", "it has no lease, but its tasks move")
        elif any(session.running for session in now.sessions):
            self._say(run, "unknown", "it has no lease, but tasks of it run")
        else:
            self._say(run, "dead", f"it has no lease, and nothing moved for {stood_s:.0f} s")


def finding(fates: Sequence[Fate], look: Look) -> Finding:
    """Whose sessions are open."""
    others = foreign(look)
    states = {state: [fate for fate in fates if fate.state == state] for state in _WORDS}
    parts = [
        f"{format_count(len(states[s]), word)} of rlflame"
        for s, word in _WORDS.items()
        if states[s]
    ]
    parts += [f"{format_count(len(others), 'session')} of others"] if others else []
    notes = [f"{fate.run.name} ({fate.state}): {fate.why}" for fate in fates]
    notes += [
        f"{session.id}: {session.pending} waiting, {session.running} running, of others"
        for session in others[:4]
    ] + ([f"and {len(others) - 4} more of others"] if len(others) > 4 else [])
    facts: dict[str, Any] = {
        "runs": [
            {
                "name": fate.run.name,
                "state": fate.state,
                "why": fate.why,
                "sessions": [session.id for session in fate.run.sessions],
            }
            for fate in fates
        ],
        "others": [session.id for session in others],
    }
    seen = ", ".join(parts) or "none open"
    if not states["dead"]:
        return ok("sessions", seen, notes=notes, **facts)
    return warning(
        "sessions", f"{seen}; dead ones take their share from others", CLEAN, notes=notes, **facts
    )
