"""Runs the checks of `rlflame cluster-check` in order."""

from __future__ import annotations

import logging
import os
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from rlflame.errors import ConfigError, FleetError
from rlflame.rollout import blas
from rlflame.rollout.machine import count_usable_cores, describe_host

from .. import object_cache
from ..client import FlameClient
from ..cluster_config import CACHE, EXPORT, START, TLS_FIX, FlameConnectError, find_configuration
from ..session_starter import PREFIX
from ..timed_call import ClusterCallError
from . import cluster_snapshot, executor_probe, stale_runs
from .cluster_snapshot import ClusterSnapshot
from .findings import CheckTimeouts, Diagnosis, Finding, shorten_error

#: The maximum number of executors to probe by default.
_MAX_EXECUTORS = 32
_SNAPSHOT_INTERVAL_S = 2.0
_RETRY_COMMAND = "rlflame cluster-check"
_NO_CLUSTER_TEXT = "no Flame cluster is configured; without one, rlflame train runs on this machine"


@dataclass
class ClusterCheck:
    """Checks a cluster, and shows each finding as soon as it is available."""

    show: Callable[[Finding], None]
    report_progress: Callable[[str], None]
    #: Checks which renderers work on this machine.
    check_graphics: Callable[[], Finding]
    workers: int | None = None
    clean: bool = False
    debug: bool = False
    timeouts: CheckTimeouts = field(default_factory=CheckTimeouts)
    _findings: list[Finding] = field(default_factory=list, init=False)
    _snapshots: list[ClusterSnapshot] = field(default_factory=list, init=False)
    #: If the probe got no answer, the snapshots that were taken before it closed its session.
    _silent_snapshots: list[ClusterSnapshot] = field(default_factory=list, init=False)

    def run(self) -> Diagnosis:
        # This keeps flamepy's log out of the output.
        logging.getLogger("flamepy").addHandler(logging.NullHandler())
        reachable = False
        client, finding = check_configuration()
        self._add(finding)
        if client is not None:
            try:
                reachable = self._check_cluster(client)
            finally:
                client.close()
        self._add(check_machine())
        # This check comes last, because it would slow the round trips that the probe measures.
        self._add(self.check_graphics())
        return Diagnosis(tuple(self._findings), find_configuration() is not None, reachable)

    def _add(self, finding: Finding) -> Finding:
        self._findings.append(finding)
        self.show(finding)
        return finding

    def _check_cluster(self, client: FlameClient) -> bool:
        """Run the checks; return whether both servers answered throughout."""
        manager = self._add(check_session_manager(client))
        cache = self._add(check_object_cache(client))
        if manager.status == "failed":
            return False
        self._client = client
        self._cache_serves = cache.status != "failed"
        steps: list[tuple[str, Callable[[], Finding]]] = [
            ("template", lambda: check_template(client)),
            ("nodes", self._check_nodes),
            *([("cleaning", self._clean)] if self.clean else []),
            ("capacity", self._check_capacity),
            ("probe", self._probe_executors),
            ("executors", self._check_executors),
            ("scheduling", self._check_scheduling),
            *([("sessions", self._check_sessions)] if self._cache_serves else []),
        ]
        for name, make_finding in steps:
            try:
                self._add(make_finding())
            except FleetError as error:
                if self.debug:
                    for line in "".join(traceback.format_exception(error)).splitlines():
                        self.report_progress(line)
                self._add(Finding(name, "failed", shorten_error(error.message), (_RETRY_COMMAND,)))
                if isinstance(error, ClusterCallError):  # later calls would not be answered either
                    return False
        return bool(cache.facts.get("answers", True))

    def _take_snapshot(self) -> ClusterSnapshot:
        snapshot = cluster_snapshot.take_snapshot(self._client, time.monotonic())
        self._snapshots.append(snapshot)
        return snapshot

    def _check_nodes(self) -> Finding:
        snapshot = self._take_snapshot()
        if self._cache_serves:
            self._scan = stale_runs.RunScan(snapshot, self.timeouts)
        return cluster_snapshot.check_nodes(snapshot)

    def _clean(self) -> Finding:
        if not self._cache_serves:
            text = "nothing was removed: without the object cache, live runs look like dead ones"
            return Finding("cleaning", "failed", text, ("see the object cache check above",))
        runs = self._scan.settle(self._take_snapshot, self.report_progress)
        return stale_runs.remove_dead_runs(self._client, runs, self.timeouts.closing_s)

    def _check_capacity(self) -> Finding:
        if not self._take_snapshot().room:
            # Executors of a session that was just closed may still be shutting down.
            time.sleep(self.timeouts.still_s)
            self._take_snapshot()
        return cluster_snapshot.check_capacity(self._snapshots[-1])

    def _probe_executors(self) -> Finding:
        room = self._snapshots[-1].room
        failures = [finding.check for finding in self._findings if finding.status == "failed"]
        needs = ["object cache", "template"]
        obstacles = [check for check in needs if check in failures]
        if not room:
            obstacles.append("capacity")
        if obstacles:
            fix = f"see the {obstacles[0]} check above"
            return Finding("probe", "warning", "no executor was probed", (fix,))
        result = executor_probe.run_probe(
            self._client,
            self.timeouts,
            min(self.workers or _MAX_EXECUTORS, room),
            self.report_progress,
            self._record_silence,
        )
        *findings, last = executor_probe.make_findings(result, describe_host())
        for finding in findings:
            self._add(finding)
        return last

    def _record_silence(self) -> None:
        """Take two snapshots while the probe's session is still open.

        The scheduling check uses them to find out why no executor has started.
        """
        self._take_snapshot()
        time.sleep(self.timeouts.still_s)
        self._take_snapshot()
        self._silent_snapshots = list(self._snapshots)

    def _check_executors(self) -> Finding:
        """Check the executors for at least `still_s`, or longer in unclear cases."""
        started_s, timeouts = self._take_snapshot().at_s, self.timeouts
        while self._snapshots[-1].executors:
            _, is_undecided = cluster_snapshot.find_stuck(self._snapshots, timeouts)
            elapsed_s = self._snapshots[-1].at_s - started_s
            total_s = self._snapshots[-1].at_s - self._snapshots[0].at_s
            if total_s >= timeouts.still_s and not (
                is_undecided and elapsed_s < timeouts.binding_s
            ):
                break
            time.sleep(min(_SNAPSHOT_INTERVAL_S, timeouts.still_s))
            self._take_snapshot()
        return cluster_snapshot.check_executors(self._snapshots, timeouts)

    def _check_scheduling(self) -> Finding:
        snapshots = self._silent_snapshots or self._snapshots
        return cluster_snapshot.check_scheduling(snapshots, self.timeouts)

    def _check_sessions(self) -> Finding:
        runs = self._scan.settle(self._take_snapshot, self.report_progress)
        snapshot = self._take_snapshot()
        names = {run.name for run in stale_runs.find_runs(snapshot)}
        return stale_runs.check_sessions([run for run in runs if run.name in names], snapshot)


def check_machine() -> Finding:
    machine, usable = describe_host(), count_usable_cores()
    facts = {**machine, "usable_processors": usable, "blas": blas.read_core_name()}
    machine["cores"] = f"{usable} of {os.cpu_count() or 1}"
    names = ("numpy", "gymnasium", "mujoco")
    versions = [f"{name} {machine['packages'].get(name, 'absent')}" for name in names]
    text = ", ".join([executor_probe.format_machine(machine), *versions])
    return Finding("this machine", "ok", text, facts=facts)


def check_configuration() -> tuple[FlameClient | None, Finding]:
    """Return an unconnected client (None if the configuration is bad) and a finding."""
    source, name = find_configuration(), "configuration"
    if source is None:
        return None, Finding(name, "failed", _NO_CLUSTER_TEXT, (START, EXPORT))
    try:
        client = FlameClient()
    except ConfigError as error:
        return None, Finding(name, "failed", shorten_error(error.message), (error.hint,))
    facts = {"source": source, "endpoint": client.endpoint, "cache": client.cache_endpoint}
    text = f"{source}: {client.endpoint}, cache {client.cache_endpoint}"
    return client, Finding(name, "ok", text, facts=facts)


def check_session_manager(client: FlameClient) -> Finding:
    try:
        answer_ms = 1000 * client.connect()
    except FlameConnectError as error:
        text = shorten_error(f"{error.message} {error.detail}")
        fixes = (*error.fixes, f"if it exits at once: {cluster_snapshot.POLICY_FIX}")
        return Finding("session manager", "failed", text, fixes)
    text = f"answers at {client.endpoint} in {answer_ms:.0f} ms"
    return Finding("session manager", "ok", text, facts={"answer_ms": answer_ms})


def check_object_cache(client: FlameClient) -> Finding:
    """Put, get and delete an object at the configured address, as a run does."""
    name, prefix = "object cache", f"{PREFIX}check-{uuid.uuid4().hex[:12]}"
    try:
        client.check_port(CACHE, client.cache_endpoint)
        started_at, content = time.perf_counter(), os.urandom(1_000_000)
        reference = object_cache.put(f"{prefix}/probe", content)
        try:
            is_kept = bytes(object_cache.get(reference.key)) == content
        except KeyError:
            is_kept = False
        object_cache.delete(f"{prefix}/*")
    except FlameConnectError as error:
        text = shorten_error(error.message)
        return Finding(name, "failed", text, error.fixes, (), {"answers": False})
    except FleetError as error:
        text = f"does not respond as an object cache: {shorten_error(error.message)}"
        fixes = (TLS_FIX, "if it hangs, restart it; with cache.storage set, no objects are lost")
        return Finding(name, "failed", text, fixes, (), {"answers": False})
    if not is_kept:
        fix = (
            "in flame-cluster.yaml, set cache.storage to a folder, so that no objects are deleted "
            "when memory is full, and raise cache.eviction.max_memory; then restart the cache"
        )
        return Finding(name, "failed", "lost an object right after storing it", (fix,))
    round_trip_ms = 1000 * (time.perf_counter() - started_at)
    facts = {"round_trip_ms": round_trip_ms, "hands_out": reference.endpoint}
    text = f"round trip of 1 MB: {round_trip_ms:.0f} ms"
    try:
        # References carry the address of the cache's own network interface.
        client.check_port(CACHE, reference.endpoint)
    except FleetError:
        text += f"; it advertises {reference.endpoint}, which this machine cannot reach"
        fix = (
            "executors fetch weights from there; if none answers, set cache.network_interface in "
            "flame-cluster.yaml to an interface that they can reach, and restart the cache"
        )
        return Finding(name, "warning", text, (fix,), (), facts)
    return Finding(name, "ok", text, facts=facts)


def check_template(client: FlameClient) -> Finding:
    """Check the application that serves as a template for runs."""
    name = client.template
    application = client.call("get_application", name)
    if application is not None and application.installer == "python":
        command = " ".join([application.command or "", *(application.arguments or [])])
        if "flamepy.runner.runpy" in command:
            facts = {"name": name, "command": command}
            return Finding("template", "ok", f"{name} runs flamepy's runner", facts=facts)
    text = f"no application {name} that uses the installer python and runs flamepy's runner"
    fixes = (
        "restart the session manager, which registers flmrun when it starts; flmctl unregister "
        "removes an incorrect one",
        "or set runner.template to another application",
    )
    return Finding("template", "failed", text, fixes)
