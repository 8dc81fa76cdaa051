"""A check-up from the first question to the last: what is asked when, and when to stop asking.

Must not know: what findings look like, how any one question is answered.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rlflame.errors import FleetError
from rlflame.fleet.flame.check import connection, executors, run_removal, stale_runs, worker_check
from rlflame.fleet.flame.check.driver_machine import machine
from rlflame.fleet.flame.check.findings import Diagnosis, Finding, Pace, brief, failed
from rlflame.fleet.flame.check.probe import Probe
from rlflame.fleet.flame.check.snapshot import Look, take
from rlflame.fleet.flame.client import Cluster, configured
from rlflame.fleet.flame.timeouts import Unanswered
from rlflame.rollout.machine import greeting

#: Asked at most, where nobody says how many.
_MOST = 32
_LOOK_EVERY_S = 2.0
_AGAIN = "rlflame cluster-check"


class Graphics(Protocol):
    """Finds which renderers work on this machine."""

    def finding(self) -> Finding: ...

    def close(self) -> None: ...


@dataclass
class Examination:
    """One check-up; every finding is handed over as soon as it is made."""

    show: Callable[[Finding], None]
    tell: Callable[[str], None]
    graphics: Callable[[], Graphics]
    workers: int | None = None
    clean: bool = False
    debug: bool = False
    pace: Pace = field(default_factory=Pace)

    def run(self) -> Diagnosis:
        # What flamepy logs would stand between our lines.
        logging.getLogger("flamepy").addHandler(logging.NullHandler())
        self._findings: list[Finding] = []
        self.end_s = self.pace.clock() + self.pace.whole_s
        reachable = False
        cluster, found = connection.configuration()
        self.add(found)
        if cluster is not None:
            try:
                reachable = self._examine(cluster)
            finally:
                cluster.close()
        self.add(machine())
        drawing = self.graphics()  # not before: it would take the time that the probe measures
        try:
            self.add(drawing.finding())
        finally:
            drawing.close()
        return Diagnosis(tuple(self._findings), configured() is not None, reachable)

    def add(self, found: Finding) -> None:
        """One more finding."""
        self._findings.append(found)
        self.show(found)

    def _examine(self, cluster: Cluster) -> bool:
        """All that can be asked; whether both servers were there to the end."""
        manager = connection.session_manager(cluster)
        self.add(manager)
        cache = connection.object_cache(cluster)
        self.add(cache)
        if manager.status == "failed":
            return False
        patient = _Patient(self, cluster, cache)
        patient.examine()
        return bool(cache.facts.get("answers", True)) and not patient.lost


class _Patient:
    """A cluster whose session manager answers."""

    def __init__(self, asked: Examination, cluster: Cluster, cache: Finding) -> None:
        self._asked = asked
        self._pace = asked.pace
        self._cluster = cluster
        self._cache_serves = cache.status != "failed"
        self._cache = str(cache.facts.get("hands_out", ""))
        self._leases = stale_runs.Leases(cluster)
        self._looks: list[Look] = []
        #: The looks up to when nobody had answered the probe, its session still open.
        self._silence: list[Look] = []
        self._failed: set[str] = set()
        #: It answers no more.
        self.lost = False

    def examine(self) -> None:
        self._step("template", lambda: connection.template(self._cluster))
        self._step("nodes", lambda: executors.nodes(self._look()))
        if not self._looks:
            return
        if self._cache_serves:
            self._census = stale_runs.Census(self._looks[0], self._leases, self._pace)
        if self._asked.clean:
            self._step("cleaning", self._clean)
        self._step("capacity", self._capacity)
        self._step("probe", self._probe)
        self._step("executors", self._executors)
        self._step(
            "scheduling", lambda: executors.scheduling(self._silence or self._looks, self._pace)
        )
        if self._cache_serves:
            self._step("sessions", self._sessions)

    def _step(self, check: str, ask: Callable[[], Finding | None]) -> None:
        """One question, unless nobody is there any more or the time is over."""
        if self.lost or self._pace.clock() > self._asked.end_s:
            why = "the cluster no longer answers" if self.lost else "the time for it was over"
            self._asked.add(failed(check, f"not looked at: {why}", _AGAIN))
            return
        try:
            found = ask()
        except FleetError as error:
            if self._asked.debug:
                for line in "".join(traceback.format_exception(error)).rstrip().split("\n"):
                    self._asked.tell(line)
            self.lost = isinstance(error, Unanswered) and not self._is_there()
            found = failed(check, brief(error.message), _AGAIN)
        if found is not None:
            self._asked.add(found)
            self._failed |= {check} if found.status == "failed" else set()

    def _is_there(self) -> bool:
        try:
            self._cluster.nodes()
        except FleetError:
            return False
        return True

    def _look(self) -> Look:
        self._looks.append(take(self._cluster, self._pace.clock()))
        return self._looks[-1]

    def _clean(self) -> Finding:
        if not self._cache_serves:
            return failed(
                "cleaning",
                "nothing was removed: without the object cache nobody can tell which runs live",
                "see the check of the object cache above",
            )
        fates = self._census.settle(self._look, self._asked.tell)
        return run_removal.clean(self._cluster, fates, self._leases, self._look(), self._pace)

    def _capacity(self) -> Finding:
        if not self._look().room:
            # Executors of a session that has just been closed are on their way out.
            self._pace.pause(self._pace.still_s)
            self._look()
        return executors.capacity(self._looks[-1])

    def _probe(self) -> Finding | None:
        look = self._looks[-1]
        if not self._cache_serves:
            return worker_check.not_asked(
                "results come through the object cache", "see the check of the object cache above"
            )
        if "template" in self._failed:
            return worker_check.not_asked("there is nothing to run on it", "see the template above")
        if not look.ready:
            return worker_check.not_asked("no node is ready", "see the check of nodes above")
        if not look.room:
            return worker_check.not_asked(
                "there is no room for one", f"once a run has ended: {_AGAIN}"
            )
        wanted = min(self._asked.workers or _MOST, look.room)
        probe = Probe(self._cluster, self._pace, self._asked.tell, self._witness)
        for found in worker_check.findings(probe.ask(wanted), greeting(), self._cache):
            self._asked.add(found)
        return None

    def _witness(self) -> None:
        """Looks while a session waits in vain, far enough apart to tell what stands still."""
        self._look()
        self._pace.pause(self._pace.still_s)
        self._look()
        self._silence = list(self._looks)

    def _executors(self) -> Finding:
        began_s = self._look().at_s
        passed_s = began_s - self._looks[0].at_s
        if self._looks[-1].executors and passed_s < self._pace.still_s:
            self._pace.pause(self._pace.still_s - passed_s)
            self._look()
        while (
            executors.undecided(self._looks, self._pace)
            and self._looks[-1].at_s - began_s < self._pace.binding_s
        ):
            self._pace.pause(min(_LOOK_EVERY_S, self._pace.still_s))
            self._look()
        return executors.executors(self._looks, self._pace)

    def _sessions(self) -> Finding:
        fates = self._census.settle(self._look, self._asked.tell)
        last = self._look()
        there = {run.name for run in stale_runs.runs(last)}
        return stale_runs.finding([fate for fate in fates if fate.run.name in there], last)
