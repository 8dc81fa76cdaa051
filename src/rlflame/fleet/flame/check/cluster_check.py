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
from rlflame.fleet.flame.check.driver_machine import check_machine
from rlflame.fleet.flame.check.findings import (
    CheckTimeouts,
    Diagnosis,
    Finding,
    make_failure,
    shorten_error,
)
from rlflame.fleet.flame.check.probe import Probe
from rlflame.fleet.flame.check.snapshot import ClusterSnapshot, take_snapshot
from rlflame.fleet.flame.client import FlameClient, find_configuration
from rlflame.fleet.flame.timed_call import ClusterCallError
from rlflame.rollout.machine import describe_host

#: Asked at most, where nobody says how many.
_MAX_EXECUTORS = 32
_SNAPSHOT_INTERVAL_S = 2.0
_RETRY_COMMAND = "rlflame cluster-check"


class Graphics(Protocol):
    """Finds which renderers work on this machine."""

    def make_finding(self) -> Finding: ...

    def close(self) -> None: ...


@dataclass
class ClusterCheck:
    """One check-up; every finding is handed over as soon as it is made."""

    show: Callable[[Finding], None]
    report_progress: Callable[[str], None]
    make_graphics: Callable[[], Graphics]
    workers: int | None = None
    clean: bool = False
    debug: bool = False
    timeouts: CheckTimeouts = field(default_factory=CheckTimeouts)

    def run(self) -> Diagnosis:
        # What flamepy logs would stand between our lines.
        logging.getLogger("flamepy").addHandler(logging.NullHandler())
        self._findings: list[Finding] = []
        self.deadline_s = self.timeouts.clock() + self.timeouts.total_s
        reachable = False
        client, finding = connection.check_configuration()
        self.add(finding)
        if client is not None:
            try:
                reachable = self._check_cluster(client)
            finally:
                client.close()
        self.add(check_machine())
        graphics_check = (
            self.make_graphics()
        )  # not before: it would take the time that the probe measures
        try:
            self.add(graphics_check.make_finding())
        finally:
            graphics_check.close()
        return Diagnosis(tuple(self._findings), find_configuration() is not None, reachable)

    def add(self, finding: Finding) -> None:
        """One more finding."""
        self._findings.append(finding)
        self.show(finding)

    def _check_cluster(self, client: FlameClient) -> bool:
        """All that can be asked; whether both servers were there to the end."""
        manager = connection.check_session_manager(client)
        self.add(manager)
        cache = connection.check_object_cache(client)
        self.add(cache)
        if manager.status == "failed":
            return False
        sequence = _CheckSequence(self, client, cache)
        sequence.run()
        return bool(cache.facts.get("answers", True)) and not sequence.is_lost


class _CheckSequence:
    """A cluster whose session manager answers."""

    def __init__(self, cluster_check: ClusterCheck, client: FlameClient, cache: Finding) -> None:
        self._cluster_check = cluster_check
        self._timeouts = cluster_check.timeouts
        self._client = client
        self._cache_serves = cache.status != "failed"
        self._cache = str(cache.facts.get("hands_out", ""))
        self._leases = stale_runs.RunLeases(client)
        self._snapshots: list[ClusterSnapshot] = []
        #: The looks up to when nobody had answered the probe, its session still open.
        self._silent_snapshots: list[ClusterSnapshot] = []
        self._failed_checks: set[str] = set()
        #: It answers no more.
        self.is_lost = False

    def run(self) -> None:
        self._run_step("template", lambda: connection.check_template(self._client))
        self._run_step("nodes", lambda: executors.check_nodes(self._take_snapshot()))
        if not self._snapshots:
            return
        if self._cache_serves:
            self._scan = stale_runs.RunScan(self._snapshots[0], self._leases, self._timeouts)
        if self._cluster_check.clean:
            self._run_step("cleaning", self._clean)
        self._run_step("capacity", self._check_capacity)
        self._run_step("probe", self._probe_executors)
        self._run_step("executors", self._check_executors)
        self._run_step(
            "scheduling",
            lambda: executors.check_scheduling(
                self._silent_snapshots or self._snapshots, self._timeouts
            ),
        )
        if self._cache_serves:
            self._run_step("sessions", self._check_sessions)

    def _run_step(self, check: str, make_finding: Callable[[], Finding | None]) -> None:
        """One question, unless nobody is there any more or the time is over."""
        if self.is_lost or self._timeouts.clock() > self._cluster_check.deadline_s:
            reason = "the cluster no longer answers" if self.is_lost else "the time for it was over"
            self._cluster_check.add(make_failure(check, f"not looked at: {reason}", _RETRY_COMMAND))
            return
        try:
            finding = make_finding()
        except FleetError as error:
            if self._cluster_check.debug:
                for line in "".join(traceback.format_exception(error)).rstrip().split("\n"):
                    self._cluster_check.report_progress(line)
            self.is_lost = isinstance(error, ClusterCallError) and not self._is_reachable()
            finding = make_failure(check, shorten_error(error.message), _RETRY_COMMAND)
        if finding is not None:
            self._cluster_check.add(finding)
            self._failed_checks |= {check} if finding.status == "failed" else set()

    def _is_reachable(self) -> bool:
        try:
            self._client.list_nodes()
        except FleetError:
            return False
        return True

    def _take_snapshot(self) -> ClusterSnapshot:
        self._snapshots.append(take_snapshot(self._client, self._timeouts.clock()))
        return self._snapshots[-1]

    def _clean(self) -> Finding:
        if not self._cache_serves:
            return make_failure(
                "cleaning",
                "nothing was removed: without the object cache nobody can tell which runs live",
                "see the check of the object cache above",
            )
        statuses = self._scan.settle(self._take_snapshot, self._cluster_check.report_progress)
        return run_removal.remove_dead_runs(
            self._client, statuses, self._leases, self._take_snapshot(), self._timeouts
        )

    def _check_capacity(self) -> Finding:
        if not self._take_snapshot().room:
            # Executors of a session that has just been closed are on their way out.
            self._timeouts.sleep(self._timeouts.still_s)
            self._take_snapshot()
        return executors.check_capacity(self._snapshots[-1])

    def _probe_executors(self) -> Finding | None:
        snapshot = self._snapshots[-1]
        if not self._cache_serves:
            return worker_check.make_skipped_finding(
                "results come through the object cache", "see the check of the object cache above"
            )
        if "template" in self._failed_checks:
            return worker_check.make_skipped_finding(
                "there is nothing to run on it", "see the template above"
            )
        if not snapshot.ready_nodes:
            return worker_check.make_skipped_finding(
                "no node is ready", "see the check of nodes above"
            )
        if not snapshot.room:
            return worker_check.make_skipped_finding(
                "there is no room for one", f"once a run has ended: {_RETRY_COMMAND}"
            )
        target = min(self._cluster_check.workers or _MAX_EXECUTORS, snapshot.room)
        probe = Probe(
            self._client, self._timeouts, self._cluster_check.report_progress, self._record_silence
        )
        for finding in worker_check.make_findings(probe.run(target), describe_host(), self._cache):
            self._cluster_check.add(finding)
        return None

    def _record_silence(self) -> None:
        """Looks while a session waits in vain, far enough apart to tell what stands still."""
        self._take_snapshot()
        self._timeouts.sleep(self._timeouts.still_s)
        self._take_snapshot()
        self._silent_snapshots = list(self._snapshots)

    def _check_executors(self) -> Finding:
        started_s = self._take_snapshot().at_s
        elapsed_s = started_s - self._snapshots[0].at_s
        if self._snapshots[-1].executors and elapsed_s < self._timeouts.still_s:
            self._timeouts.sleep(self._timeouts.still_s - elapsed_s)
            self._take_snapshot()
        while (
            executors.is_undecided(self._snapshots, self._timeouts)
            and self._snapshots[-1].at_s - started_s < self._timeouts.binding_s
        ):
            self._timeouts.sleep(min(_SNAPSHOT_INTERVAL_S, self._timeouts.still_s))
            self._take_snapshot()
        return executors.check_executors(self._snapshots, self._timeouts)

    def _check_sessions(self) -> Finding:
        statuses = self._scan.settle(self._take_snapshot, self._cluster_check.report_progress)
        snapshot = self._take_snapshot()
        run_names = {run.name for run in stale_runs.find_runs(snapshot)}
        return stale_runs.make_finding(
            [status for status in statuses if status.run.name in run_names], snapshot
        )
