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
from rlflame.fleet.flame.check.findings import (
    Finding,
    make_failure,
    make_ok,
    make_warning,
    shorten_error,
)
from rlflame.fleet.flame.client import FlameClient
from rlflame.fleet.flame.endpoint import CACHE, MANAGER, FlameConfigError, find_configuration
from rlflame.fleet.flame.endpoint import EXPORT as EXPORT
from rlflame.fleet.flame.endpoint import UP as UP
from rlflame.fleet.flame.object_cache import Reference
from rlflame.fleet.flame.session_start import PREFIX
from rlflame.fleet.flame.timed_call import ClusterCallError, call_with_timeout

_MEGABYTES = 8
_PORT_CHECK_S = 10.0


def check_configuration() -> tuple[FlameClient | None, Finding]:
    """The cluster that is configured, not yet connected to, or what is wrong with that."""
    source = find_configuration()
    if source is None:
        return None, make_failure("configuration", "no Flame cluster is configured", UP, EXPORT)
    try:
        client = FlameClient()
    except FlameConfigError as error:
        return None, make_failure(
            "configuration", shorten_error(error.message), *error.fixes, source=source
        )
    facts: dict[str, Any] = {
        "source": source,
        "endpoint": client.endpoint,
        "cache": client.cache_endpoint,
    }
    seen = f"{source}: {client.endpoint}, cache {client.cache_endpoint}"
    if _is_local(client.cache_endpoint) and not _is_local(client.endpoint):
        return client, make_warning(
            "configuration",
            f"{seen}; the cache is looked for on this machine, the session manager is not",
            f"export FLAME_CACHE_ENDPOINT=grpc://{urlsplit(client.endpoint).hostname}:9090",
            **facts,
        )
    return client, make_ok("configuration", seen, **facts)


def _is_local(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _format_silence(endpoint: str, error: FleetError) -> str:
    cause = error.__cause__
    reason = (cause.strerror or str(cause)) if isinstance(cause, OSError) else error.message
    return f"nobody answers at {endpoint} ({shorten_error(reason)})"


def check_session_manager(client: FlameClient) -> Finding:
    facts: dict[str, Any] = {"endpoint": client.endpoint}
    try:
        call_with_timeout(
            lambda: client.check_port(client.endpoint, MANAGER), _PORT_CHECK_S, "knock"
        )
    except FleetError as error:
        start = f"start it: {UP}" if _is_local(client.endpoint) else "start it there"
        return make_failure(
            "session manager",
            _format_silence(client.endpoint, error),
            start,
            "or lead to another: export FLAME_ENDPOINT=http://HOST:8080",
            **facts,
        )
    try:
        client.connect()
        started_at = time.perf_counter()
        client.list_applications()
    except FleetError as error:
        return make_failure(
            "session manager",
            f"something listens at {client.endpoint}, but not as a session manager: "
            f"{shorten_error(error.message)}",
            f"try {client.format_tls_hint(client.endpoint)}; clients' port is 8080, not 8081",
            "if it hangs, restart it",
            **facts,
        )
    took_ms = 1000 * (time.perf_counter() - started_at)
    return make_ok(
        "session manager",
        f"answers at {client.endpoint} in {took_ms:.0f} ms",
        answer_ms=took_ms,
        **facts,
    )


def check_object_cache(client: FlameClient) -> Finding:
    """Put, get and delete, by the configured address, as a run does."""
    facts: dict[str, Any] = {"endpoint": client.cache_endpoint}
    try:
        call_with_timeout(
            lambda: client.check_port(client.cache_endpoint, CACHE), _PORT_CHECK_S, "knock"
        )
    except FleetError as error:
        start = f"{UP} object-cache" if _is_local(client.cache_endpoint) else "there"
        return make_failure(
            "object cache",
            _format_silence(client.cache_endpoint, error),
            f"start it: {start}",
            "or lead to another: export FLAME_CACHE_ENDPOINT=grpc://HOST:9090",
            answers=False,
            **facts,
        )
    prefix = f"{PREFIX}check-{uuid.uuid4().hex[:12]}"
    try:
        finding = _measure_round_trip(client, f"{prefix}/probe", facts)
        flame_object_cache.delete(f"{prefix}/*")
        return finding
    except FleetError as error:
        return make_failure(
            "object cache",
            f"it does not answer as a cache: {shorten_error(error.message)}",
            "try grpcs:// instead of grpc://, or the other way round, if its TLS differs",
            "if it hangs, restart it; with cache.storage set, nothing is lost",
            answers=False,
            **facts,
        )


def _measure_round_trip(client: FlameClient, prefix: str, facts: dict[str, Any]) -> Finding:
    # What is random cannot be compressed on the way.
    content = os.urandom(_MEGABYTES * 1_000_000)
    started_at = time.perf_counter()
    small = flame_object_cache.put(prefix, content[:1000])
    try:
        flame_object_cache.get(small.key)
        small_ms = 1000 * (time.perf_counter() - started_at)
        started_at = time.perf_counter()
        large = flame_object_cache.put(prefix, content)
        put_s = time.perf_counter() - started_at
        started_at = time.perf_counter()
        returned = bytes(flame_object_cache.get(large.key))
        get_s = time.perf_counter() - started_at
    except KeyError:
        return make_failure(
            "object cache",
            "it takes objects and has lost them the next moment",
            "in flame-cluster.yaml give it cache.storage (a folder), so that a full memory "
            "deletes nothing, and more cache.eviction.max_memory; then restart it",
            **facts,
        )
    if returned != content:
        return make_failure(
            "object cache", "it gave back other bytes than it took", "restart it", **facts
        )
    flame_object_cache.delete(large.key)
    keeps_deleted = _is_kept(client, large)
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
    if keeps_deleted:
        return make_warning("object cache", f"{seen}; but it keeps what is deleted", "restart it",
                       **facts, **measured)  # fmt: skip
    if small.endpoint != client.cache_endpoint and not _is_reachable(client, small):
        return make_warning(
            "object cache",
            f"{seen}; it refers to itself as {small.endpoint}, which this machine does not reach. "
            "Executors fetch weights from there",
            "if no executor answers, set cache.network_interface in flame-cluster.yaml to an "
            "interface that executors reach, and restart the cache",
            **facts,
            **measured,
        )
    return make_ok("object cache", seen, **facts, **measured)


def _is_reachable(client: FlameClient, reference: Reference) -> bool:
    """References carry the address of the cache's own network interface."""
    try:
        call_with_timeout(
            lambda: client.check_port(reference.endpoint, CACHE), _PORT_CHECK_S, "knock"
        )
    except FleetError:
        return False
    return True


def _is_kept(client: FlameClient, reference: Reference) -> bool:
    try:
        flame_object_cache.get(reference.key)
    except (KeyError, ClusterCallError):
        return False
    return True


def check_template(client: FlameClient) -> Finding:
    """The application that ours are modelled on."""
    name = client.template
    application = client.get_application(name)
    if application is None:
        restart_hint = "restart the session manager, which registers it when it starts"
        register_hint = (
            f"register it (flmctl register), or let runner.template name flmrun, not {name}"
        )
        return make_failure(
            "template",
            f"there is no application {name}",
            restart_hint if name == "flmrun" else register_hint,
        )
    command = " ".join([application.command or "", *(application.arguments or [])])
    facts: dict[str, Any] = {"name": name, "command": command, "installer": application.installer}
    if application.installer != "python" or "flamepy.runner.runpy" not in command:
        return make_failure(
            "template",
            f"{name} has the installer {application.installer!r} and runs {command!r}, not "
            "flamepy's "
            "runner",
            "unregister it (flmctl unregister) and restart the session manager, which registers "
            "flmrun anew",
            **facts,
        )
    return make_ok("template", f"{name} runs flamepy's runner", **facts)
