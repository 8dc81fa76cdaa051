"""Whether there is a cluster at all: configuration, session manager, object cache, template.

Must not know: what happens on the cluster.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

from rlflame.errors import FleetError
from rlflame.fleet.flame import object_cache as flame_object_cache
from rlflame.fleet.flame.check.findings import Finding, brief, failed, ok, warning
from rlflame.fleet.flame.client import Cluster
from rlflame.fleet.flame.endpoint import CACHE, MANAGER, Misconfigured, configured
from rlflame.fleet.flame.endpoint import EXPORT as EXPORT
from rlflame.fleet.flame.endpoint import UP as UP
from rlflame.fleet.flame.object_cache import Reference
from rlflame.fleet.flame.session_start import PREFIX
from rlflame.fleet.flame.timeouts import Unanswered, bounded

_MEGABYTES = 8
_KNOCK_S = 10.0


def configuration() -> tuple[Cluster | None, Finding]:
    """The cluster that is configured, not yet connected to, or what is wrong with that."""
    source = configured()
    if source is None:
        return None, failed("configuration", "no Flame cluster is configured", UP, EXPORT)
    try:
        cluster = Cluster()
    except Misconfigured as error:
        return None, failed("configuration", brief(error.message), *error.fixes, source=source)
    facts: dict[str, Any] = {
        "source": source,
        "endpoint": cluster.endpoint,
        "cache": cluster.cache_endpoint,
    }
    seen = f"{source}: {cluster.endpoint}, cache {cluster.cache_endpoint}"
    if _is_local(cluster.cache_endpoint) and not _is_local(cluster.endpoint):
        return cluster, warning(
            "configuration",
            f"{seen}; the cache is looked for on this machine, the session manager is not",
            f"export FLAME_CACHE_ENDPOINT=grpc://{urlsplit(cluster.endpoint).hostname}:9090",
            **facts,
        )
    return cluster, ok("configuration", seen, **facts)


def _is_local(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _silence(endpoint: str, error: FleetError) -> str:
    cause = error.__cause__
    why = (cause.strerror or str(cause)) if isinstance(cause, OSError) else error.message
    return f"nobody answers at {endpoint} ({brief(why)})"


def session_manager(cluster: Cluster) -> Finding:
    facts: dict[str, Any] = {"endpoint": cluster.endpoint}
    try:
        bounded(lambda: cluster.knock(cluster.endpoint, MANAGER), _KNOCK_S, "knock")
    except FleetError as error:
        start = f"start it: {UP}" if _is_local(cluster.endpoint) else "start it there"
        return failed(
            "session manager",
            _silence(cluster.endpoint, error),
            start,
            "or lead to another: export FLAME_ENDPOINT=http://HOST:8080",
            **facts,
        )
    try:
        cluster.connect()
        began = time.perf_counter()
        cluster.applications()
    except FleetError as error:
        return failed(
            "session manager",
            f"something listens at {cluster.endpoint}, but not as a session manager: "
            f"{brief(error.message)}",
            f"try {cluster.tls_hint(cluster.endpoint)}; clients' port is 8080, not 8081",
            "if it hangs, restart it",
            **facts,
        )
    took_ms = 1000 * (time.perf_counter() - began)
    return ok(
        "session manager",
        f"answers at {cluster.endpoint} in {took_ms:.0f} ms",
        answer_ms=took_ms,
        **facts,
    )


def object_cache(cluster: Cluster) -> Finding:
    """Put, get and delete, by the configured address, as a run does."""
    facts: dict[str, Any] = {"endpoint": cluster.cache_endpoint}
    try:
        bounded(lambda: cluster.knock(cluster.cache_endpoint, CACHE), _KNOCK_S, "knock")
    except FleetError as error:
        start = f"{UP} object-cache" if _is_local(cluster.cache_endpoint) else "there"
        return failed(
            "object cache",
            _silence(cluster.cache_endpoint, error),
            f"start it: {start}",
            "or lead to another: export FLAME_CACHE_ENDPOINT=grpc://HOST:9090",
            answers=False,
            **facts,
        )
    prefix = f"{PREFIX}check-{uuid.uuid4().hex[:12]}"
    try:
        found = _round_trip(cluster, f"{prefix}/probe", facts)
        flame_object_cache.delete(f"{prefix}/*")
        return found
    except FleetError as error:
        return failed(
            "object cache",
            f"it does not answer as a cache: {brief(error.message)}",
            "try grpcs:// instead of grpc://, or the other way round, if its TLS differs",
            "if it hangs, restart it; with cache.storage set, nothing is lost",
            answers=False,
            **facts,
        )


def _round_trip(cluster: Cluster, prefix: str, facts: dict[str, Any]) -> Finding:
    # What is random cannot be compressed on the way.
    content = os.urandom(_MEGABYTES * 1_000_000)
    began = time.perf_counter()
    small = flame_object_cache.put(prefix, content[:1000])
    try:
        flame_object_cache.get(small.key)
        small_ms = 1000 * (time.perf_counter() - began)
        began = time.perf_counter()
        large = flame_object_cache.put(prefix, content)
        put_s = time.perf_counter() - began
        began = time.perf_counter()
        came_back = bytes(flame_object_cache.get(large.key))
        get_s = time.perf_counter() - began
    except KeyError:
        return failed(
            "object cache",
            "it takes objects and has lost them the next moment",
            "in flame-cluster.yaml give it cache.storage (a folder), so that a full memory "
            "deletes nothing, and more cache.eviction.max_memory; then restart it",
            **facts,
        )
    if came_back != content:
        return failed(
            "object cache", "it gave back other bytes than it took", "restart it", **facts
        )
    flame_object_cache.delete(large.key)
    kept = _is_kept(cluster, large)
    rates = [_MEGABYTES / max(seconds, 1e-9) for seconds in (put_s, get_s)]
    seen = (
        f"round trip {small_ms:.0f} ms; {_MEGABYTES} MB put at {rates[0]:.0f} MB/s, "
        f"got at {rates[1]:.0f} MB/s"
    )
    measured: dict[str, Any] = {
        "round_trip_ms": small_ms,
        "put_mb_per_s": rates[0],
        "get_mb_per_s": rates[1],
        "hands_out": small.endpoint,
    }
    if kept:
        return warning("object cache", f"{seen}; but it keeps what is deleted", "restart it",
                       **facts, **measured)  # fmt: skip
    if small.endpoint != cluster.cache_endpoint and not _is_reachable(cluster, small):
        return warning(
            "object cache",
            f"{seen}; it refers to itself as {small.endpoint}, which this machine does not reach. "
            "Executors fetch weights from there",
            "if no executor answers, set cache.network_interface in flame-cluster.yaml to an "
            "interface that executors reach, and restart the cache",
            **facts,
            **measured,
        )
    return ok("object cache", seen, **facts, **measured)


def _is_reachable(cluster: Cluster, place: Reference) -> bool:
    """References carry the address of the cache's own network interface."""
    try:
        bounded(lambda: cluster.knock(place.endpoint, CACHE), _KNOCK_S, "knock")
    except FleetError:
        return False
    return True


def _is_kept(cluster: Cluster, place: Reference) -> bool:
    try:
        flame_object_cache.get(place.key)
    except (KeyError, Unanswered):
        return False
    return True


def template(cluster: Cluster) -> Finding:
    """The application that ours are modelled on."""
    name = cluster.template
    found = cluster.application(name)
    if found is None:
        own = "restart the session manager, which registers it when it starts"
        other = f"register it (flmctl register), or let runner.template name flmrun, not {name}"
        return failed(
            "template", f"there is no application {name}", own if name == "flmrun" else other
        )
    command = " ".join([found.command or "", *(found.arguments or [])])
    facts: dict[str, Any] = {"name": name, "command": command, "installer": found.installer}
    if found.installer != "python" or "flamepy.runner.runpy" not in command:
        return failed(
            "template",
            f"{name} has the installer {found.installer!r} and runs {command!r}, not flamepy's "
            "runner",
            "unregister it (flmctl unregister) and restart the session manager, which registers "
            "flmrun anew",
            **facts,
        )
    return ok("template", f"{name} runs flamepy's runner", **facts)
