"""ClusterCheck: the order of the questions, when to stop asking, and the first of them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol
from urllib.parse import urlsplit

from rlflame.errors import ConfigError, FleetError
from rlflame.rollout import blas
from rlflame.rollout.machine import count_usable_cores, describe_host

from .. import object_cache
from ..client import FlameClient
from ..cluster_config import CACHE, EXPORT, UP, FlameConnectError, find_configuration, is_local
from ..session_starter import PREFIX
from ..timed_call import ClusterCallError
from . import cluster_snapshot, executor_probe, stale_runs
from .cluster_snapshot import ClusterSnapshot, take_snapshot
from .findings import Check, CheckTimeouts, Diagnosis, Finding, shorten_error

#: The most executors that are asked by default.
_MAX_EXECUTORS = 32
_SNAPSHOT_INTERVAL_S = 2.0
_RETRY_COMMAND = "rlflame cluster-check"
#: The size of the object with which the cache is measured.
_MEGABYTES = 8


class Graphics(Protocol):
    """Finds which renderers work on this machine."""

    def make_finding(self) -> Finding: ...

    def close(self) -> None: ...


@dataclass
class ClusterCheck:
    """One check; every finding is shown as soon as it is made."""

    show: Callable[[Finding], None]
    report_progress: Callable[[str], None]
    make_graphics: Callable[[], Graphics]
    workers: int | None = None
    clean: bool = False
    debug: bool = False
    timeouts: CheckTimeouts = field(default_factory=CheckTimeouts)
    _findings: list[Finding] = field(default_factory=list, init=False)
    _snapshots: list[ClusterSnapshot] = field(default_factory=list, init=False)
    #: Those up to when no executor had answered the probe, its session still open.
    _silent_snapshots: list[ClusterSnapshot] = field(default_factory=list, init=False)
    #: The session manager answers no more.
    _is_lost: bool = field(default=False, init=False)

    def run(self) -> Diagnosis:
        # flamepy's log would stand between our lines.
        logging.getLogger("flamepy").addHandler(logging.NullHandler())
        self._deadline_s = self.timeouts.clock() + self.timeouts.total_s
        reachable = False
        client, finding = check_configuration()
        self._add(finding)
        if client is not None:
            try:
                reachable = self._check_cluster(client)
            finally:
                client.close()
        self._add(check_machine())
        # Not earlier: it would take the time that the probe measures.
        graphics = self.make_graphics()
        try:
            self._add(graphics.make_finding())
        finally:
            graphics.close()
        return Diagnosis(tuple(self._findings), find_configuration() is not None, reachable)

    def _add(self, finding: Finding) -> None:
        self._findings.append(finding)
        self.show(finding)

    def _check_cluster(self, client: FlameClient) -> bool:
        """Ask every question; whether both servers answered to the end."""
        manager = check_session_manager(client)
        self._add(manager)
        cache = check_object_cache(client)
        self._add(cache)
        if manager.status == "failed":
            return False
        self._client, self._leases = client, stale_runs.RunLeases()
        self._cache_serves = cache.status != "failed"
        self._cache = str(cache.facts.get("hands_out", ""))
        self._run_step("template", lambda: check_template(client))
        self._run_step("nodes", lambda: cluster_snapshot.check_nodes(self._take_snapshot()))
        if self._snapshots:
            self._run_steps()
        return bool(cache.facts.get("answers", True)) and not self._is_lost

    def _run_steps(self) -> None:
        """The questions to a session manager that answers."""
        if self._cache_serves:
            self._scan = stale_runs.RunScan(self._snapshots[0], self._leases, self.timeouts)
        if self.clean:
            self._run_step("cleaning", self._clean)
        self._run_step("capacity", self._check_capacity)
        self._run_step("probe", self._probe_executors)
        self._run_step("executors", self._check_executors)
        self._run_step("scheduling", self._check_scheduling)
        if self._cache_serves:
            self._run_step("sessions", self._check_sessions)

    def _run_step(self, name: str, make_finding: Callable[[], Finding | None]) -> None:
        """One question, unless the session manager is away or the time is over."""
        check = Check(name)
        if self._is_lost or self.timeouts.clock() > self._deadline_s:
            reason = "the cluster no longer answers" if self._is_lost else "the time for it is over"
            self._add(check.make_failure(f"not looked at: {reason}", _RETRY_COMMAND))
            return
        try:
            finding = make_finding()
        except FleetError as error:
            if self.debug:
                for line in "".join(traceback.format_exception(error)).rstrip().split("\n"):
                    self.report_progress(line)
            if isinstance(error, ClusterCallError):
                try:
                    self._client.call("list_nodes")
                except FleetError:
                    self._is_lost = True
            finding = check.make_failure(shorten_error(error.message), _RETRY_COMMAND)
        if finding is not None:
            self._add(finding)

    def _take_snapshot(self) -> ClusterSnapshot:
        self._snapshots.append(take_snapshot(self._client, self.timeouts.clock()))
        return self._snapshots[-1]

    def _settle_runs(self) -> list[stale_runs.ClusterRunStatus]:
        return self._scan.settle(self._take_snapshot, self.report_progress)

    def _clean(self) -> Finding:
        if not self._cache_serves:
            return Check("cleaning").make_failure(
                "nothing was removed: without the object cache nobody can tell which runs live",
                "see the check of the object cache above",
            )
        return stale_runs.remove_dead_runs(
            self._client, self._settle_runs(), self._leases, self._take_snapshot(), self.timeouts
        )

    def _check_capacity(self) -> Finding:
        if not self._take_snapshot().room:
            # Executors of a session that has just been closed are on their way out.
            self.timeouts.sleep(self.timeouts.still_s)
            self._take_snapshot()
        return cluster_snapshot.check_capacity(self._snapshots[-1])

    def _probe_executors(self) -> Finding | None:
        snapshot = self._snapshots[-1]
        has_template = not any(
            finding.check == "template" and finding.status == "failed" for finding in self._findings
        )
        needs = (
            (self._cache_serves, "results come through the object cache", "object cache"),
            (has_template, "there is nothing to run on it", "template"),
            (snapshot.ready_nodes, "no node is ready", "nodes"),
            (snapshot.room, "there is no room for one, until a run has ended", "capacity"),
        )
        for is_met, reason, check in needs:
            if not is_met:
                text = f"no executor was asked: {reason}"
                return Check("probe").make_warning(text, f"see the check of {check} above")
        target = min(self.workers or _MAX_EXECUTORS, snapshot.room)
        probe = executor_probe.Probe(self._client, self.timeouts, target, self.report_progress)
        result = probe.run(self._record_silence)
        for finding in executor_probe.make_findings(result, describe_host(), self._cache):
            self._add(finding)
        return None

    def _record_silence(self) -> None:
        """Snapshots while a session waits in vain, far enough apart to see what stands still."""
        self._take_snapshot()
        self.timeouts.sleep(self.timeouts.still_s)
        self._take_snapshot()
        self._silent_snapshots = list(self._snapshots)

    def _check_executors(self) -> Finding:
        started_s = self._take_snapshot().at_s
        elapsed_s = started_s - self._snapshots[0].at_s
        if self._snapshots[-1].executors and elapsed_s < self.timeouts.still_s:
            self.timeouts.sleep(self.timeouts.still_s - elapsed_s)
            self._take_snapshot()
        while (
            cluster_snapshot.is_undecided(self._snapshots, self.timeouts)
            and self._snapshots[-1].at_s - started_s < self.timeouts.binding_s
        ):
            self.timeouts.sleep(min(_SNAPSHOT_INTERVAL_S, self.timeouts.still_s))
            self._take_snapshot()
        return cluster_snapshot.check_executors(self._snapshots, self.timeouts)

    def _check_scheduling(self) -> Finding:
        snapshots = self._silent_snapshots or self._snapshots
        return cluster_snapshot.check_scheduling(snapshots, self.timeouts)

    def _check_sessions(self) -> Finding:
        statuses, snapshot = self._settle_runs(), self._take_snapshot()
        names = {run.name for run in stale_runs.find_runs(snapshot)}
        return stale_runs.check_sessions(
            [status for status in statuses if status.run.name in names], snapshot
        )


def check_machine() -> Finding:
    machine = describe_host()
    usable, processors = count_usable_cores(), os.cpu_count() or 1
    check = Check("this machine", **machine, usable_processors=usable, processors=processors)
    check.facts["blas"] = blas.read_core_name()
    share = f"{usable} of {processors}" if usable != processors else processors
    names = ("numpy", "gymnasium", "mujoco")
    versions = [f"{name} {machine['packages'].get(name, 'absent')}" for name in names]
    return check.make_ok(
        ", ".join([executor_probe.format_machine({**machine, "cores": share}), *versions])
    )


def check_configuration() -> tuple[FlameClient | None, Finding]:
    """The configured cluster, not yet connected to, or what is wrong with the configuration."""
    check = Check("configuration")
    source = find_configuration()
    if source is None:
        return None, check.make_failure("no Flame cluster is configured", UP, EXPORT)
    check.facts["source"] = source
    try:
        client = FlameClient()
    except ConfigError as error:
        return None, check.make_failure(shorten_error(error.message), error.hint)
    check.facts |= {"endpoint": client.endpoint, "cache": client.cache_endpoint}
    seen = f"{source}: {client.endpoint}, cache {client.cache_endpoint}"
    if is_local(client.cache_endpoint) and not is_local(client.endpoint):
        return client, check.make_warning(
            f"{seen}; the cache is looked for on this machine, the session manager is not",
            f"export FLAME_CACHE_ENDPOINT=grpc://{urlsplit(client.endpoint).hostname}:9090",
        )
    return client, check.make_ok(seen)


def check_session_manager(client: FlameClient) -> Finding:
    check = Check("session manager", endpoint=client.endpoint)
    try:
        answer_ms = check.facts["answer_ms"] = 1000 * client.connect()
    except FlameConnectError as error:
        return check.make_failure(shorten_error(f"{error.message} {error.detail}"), *error.fixes)
    return check.make_ok(f"answers at {client.endpoint} in {answer_ms:.0f} ms")


def check_object_cache(client: FlameClient) -> Finding:
    """Put, get and delete, by the configured address, as a run does."""
    check = Check("object cache", endpoint=client.cache_endpoint)
    prefix = f"{PREFIX}check-{uuid.uuid4().hex[:12]}"
    try:
        client.check_port(CACHE, client.cache_endpoint)
        finding = _measure_round_trip(client, f"{prefix}/probe", check)
        object_cache.delete(f"{prefix}/*")
        return finding
    except FlameConnectError as error:
        check.facts["answers"] = False
        return check.make_failure(shorten_error(error.message), *error.fixes)
    except FleetError as error:
        check.facts["answers"] = False
        return check.make_failure(
            f"it does not answer as a cache: {shorten_error(error.message)}",
            f"try {client.format_tls_hint(client.cache_endpoint)}",
            "if it hangs, restart it; with cache.storage set, nothing is lost",
        )


def _measure_round_trip(client: FlameClient, prefix: str, check: Check) -> Finding:
    content = os.urandom(_MEGABYTES * 1_000_000)  # which cannot be compressed on the way
    times_s = [time.perf_counter()]
    small = object_cache.put(prefix, content[:1000])
    try:
        object_cache.get(small.key)
        times_s.append(time.perf_counter())
        large = object_cache.put(prefix, content)
        times_s.append(time.perf_counter())
        returned = bytes(object_cache.get(large.key))
        times_s.append(time.perf_counter())
    except KeyError:
        return check.make_failure(
            "it takes objects and has lost them the next moment",
            "in flame-cluster.yaml give it cache.storage (a folder), so that a full memory "
            "deletes nothing, and more cache.eviction.max_memory; then restart it",
        )
    if returned != content:
        return check.make_failure("it gave back other bytes than it took", "restart it")
    small_s, put_s, get_s = (max(b - a, 1e-9) for a, b in pairwise(times_s))
    rates = {"put_mb_per_s": _MEGABYTES / put_s, "get_mb_per_s": _MEGABYTES / get_s}
    check.facts |= {"round_trip_ms": 1000 * small_s, **rates, "hands_out": small.endpoint}
    seen = (
        f"round trip {1000 * small_s:.0f} ms; {_MEGABYTES} MB put at "
        f"{rates['put_mb_per_s']:.0f} MB/s, got at {rates['get_mb_per_s']:.0f} MB/s"
    )
    object_cache.delete(large.key)
    with contextlib.suppress(KeyError, ClusterCallError):
        object_cache.get(large.key)
        return check.make_warning(f"{seen}; but it keeps what is deleted", "restart it")
    try:
        # References carry the address of the cache's own network interface.
        client.check_port(CACHE, small.endpoint)
    except FleetError:
        return check.make_warning(
            f"{seen}; it refers to itself as {small.endpoint}, which this machine does not reach. "
            "Executors fetch weights from there",
            "if no executor answers, set cache.network_interface in flame-cluster.yaml to an "
            "interface that executors reach, and restart the cache",
        )
    return check.make_ok(seen)


def check_template(client: FlameClient) -> Finding:
    """The application that ours are modelled on."""
    name = client.template
    application = client.call("get_application", name)
    check = Check("template")
    if application is not None:
        command = " ".join([application.command or "", *(application.arguments or [])])
        check.facts |= {"name": name, "command": command, "installer": application.installer}
        if application.installer == "python" and "flamepy.runner.runpy" in command:
            return check.make_ok(f"{name} runs flamepy's runner")
    return check.make_failure(
        f"there is no application {name} with the installer python that runs flamepy's runner",
        "restart the session manager, which registers flmrun when it starts; flmctl unregister "
        "removes a wrong one",
        "or let runner.template name another application",
    )
