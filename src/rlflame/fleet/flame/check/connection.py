"""Checks whether there is a cluster: configuration, session manager, object cache, template."""

from __future__ import annotations

import os
import time
import uuid
from itertools import pairwise
from urllib.parse import urlsplit

from rlflame.errors import FleetError

from .. import object_cache
from ..client import FlameClient
from ..cluster_config import (
    CACHE,
    EXPORT,
    UP,
    FlameConfigError,
    FlameConnectError,
    find_configuration,
    is_local,
)
from ..session_starter import PREFIX
from ..timed_call import ClusterCallError
from .findings import Check, Finding, shorten_error

_MEGABYTES = 8


def check_configuration() -> tuple[FlameClient | None, Finding]:
    """The configured cluster, not yet connected to, or what is wrong with the configuration."""
    check = Check("configuration")
    source = find_configuration()
    if source is None:
        return None, check.make_failure("no Flame cluster is configured", UP, EXPORT)
    check.facts["source"] = source
    try:
        client = FlameClient()
    except FlameConfigError as error:
        return None, check.make_failure(shorten_error(error.message), *error.fixes)
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
        answer_ms = 1000 * client.connect()
    except FlameConnectError as error:
        return check.make_failure(shorten_error(f"{error.message} {error.detail}"), *error.fixes)
    check.facts["answer_ms"] = answer_ms
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
            "try grpcs:// instead of grpc://, or the other way round, if its TLS differs",
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
    check.facts |= {
        "round_trip_ms": 1000 * small_s,
        "put_mb_per_s": _MEGABYTES / put_s,
        "get_mb_per_s": _MEGABYTES / get_s,
        "hands_out": small.endpoint,
    }
    seen = (
        f"round trip {1000 * small_s:.0f} ms; {_MEGABYTES} MB put at "
        f"{_MEGABYTES / put_s:.0f} MB/s, got at {_MEGABYTES / get_s:.0f} MB/s"
    )
    object_cache.delete(large.key)
    if _has_object(large.key):
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


def _has_object(key: str) -> bool:
    try:
        object_cache.get(key)
    except (KeyError, ClusterCallError):
        return False
    return True


def check_template(client: FlameClient) -> Finding:
    """The application that ours are modelled on."""
    name = client.template
    application = client.get_application(name)
    if application is None:
        return Check("template").make_failure(
            f"there is no application {name}",
            "restart the session manager, which registers it when it starts"
            if name == "flmrun"
            else f"register it (flmctl register), or let runner.template name flmrun, not {name}",
        )
    command = " ".join([application.command or "", *(application.arguments or [])])
    installer = application.installer
    check = Check("template", name=name, command=command, installer=installer)
    if installer != "python" or "flamepy.runner.runpy" not in command:
        return check.make_failure(
            f"{name} has the installer {installer!r} and runs {command!r}, not flamepy's runner",
            "unregister it (flmctl unregister) and restart the session manager, which registers "
            "flmrun anew",
        )
    return check.make_ok(f"{name} runs flamepy's runner")
