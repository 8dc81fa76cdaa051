"""The configuration of a Flame cluster, and the errors that name what is wrong with it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rlflame.errors import ConfigError, FleetUnreachableError, format_shell

from .timed_call import format_error

START = "docker compose -f compose/compose.yaml up -d"
EXPORT = "export FLAME_ENDPOINT=http://127.0.0.1:8080 FLAME_CACHE_ENDPOINT=grpc://127.0.0.1:9090"
TLS_FIX = (
    "try https:// and grpcs:// if its TLS is on (FLAME_CA_FILE names the certificate of its own "
    "authority), http:// and grpc:// if it is off"
)


@dataclass(frozen=True, slots=True)
class FlameServer:
    """One of the two servers that a driver calls, and how its address is written."""

    role: str
    variable: str
    schemes: tuple[str, ...]
    port: int

    @property
    def example(self) -> str:
        return f"{self.schemes[0]}://HOST:{self.port}"


MANAGER = FlameServer("session manager", "FLAME_ENDPOINT", ("http", "https"), 8080)
CACHE = FlameServer("object cache", "FLAME_CACHE_ENDPOINT", ("grpc", "grpcs", "grpc+tls"), 9090)


class FlameConnectError(FleetUnreachableError):
    """A server that does not answer; `fixes` are the advice of cluster-check."""

    def __init__(
        self, server: FlameServer, endpoint: str, message: str, fix: str, detail: str = ""
    ) -> None:
        self.fixes = (fix, f"or lead to another: export {server.variable}={server.example}")
        message += f" It is configured in {find_source(server, endpoint)}."
        hint = "; ".join([*self.fixes, "rlflame cluster-check", "--local runs it here"])
        super().__init__(message, hint, detail)


def find_configuration() -> str | None:
    """Where a cluster is configured, or None."""
    if os.environ.get("FLAME_ENDPOINT"):
        return "FLAME_ENDPOINT"
    path = get_config_path()
    return path if os.path.exists(path) else None


def get_config_path() -> str:
    return os.path.expanduser("~/.flame/flame.yaml")


def find_source(server: FlameServer, endpoint: str) -> str:
    """Where this server's address comes from: the variable, else the file, else flamepy."""
    if server.variable in os.environ:
        return server.variable
    with contextlib.suppress(OSError, UnicodeError):
        if endpoint in Path(get_config_path()).read_text("utf-8"):
            return get_config_path()
    return f"flamepy's default, as {server.variable} is not set"


def check_endpoint(server: FlameServer, endpoint: str) -> None:
    """Raises ConfigError if this is not an address of such a server."""
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in server.schemes and parts.hostname and parts.port != 0
    except ValueError:  # brackets that do not close, or a port that is no number up to 65535
        is_address = False
    if is_address:
        return
    is_bare = endpoint and "://" not in endpoint
    suggestion = f"{server.schemes[0]}://{endpoint}" if is_bare else server.example
    raise ConfigError(
        f"The address of the {server.role}, {endpoint!r} in {find_source(server, endpoint)}, "
        f"is not of the form {' or '.join(server.schemes)}://HOST:PORT.",
        f"export {server.variable}={suggestion}",
    )


def make_unconfigured_error(
    alternative: str = "--local runs it on this machine.",
) -> FleetUnreachableError:
    return FleetUnreachableError(
        f"No Flame cluster is configured, and none is needed: {alternative}",
        f"to bring up a cluster here, in containers: {START} && {EXPORT}",
    )


def make_unreadable_error(error: Exception) -> ConfigError:
    """flamepy reads the file before the variables, so a broken file is always in the way."""
    path = get_config_path()
    if isinstance(error, (AttributeError, KeyError, TypeError)):
        cause = "it is empty, or not laid out as Flame's configuration is"
    else:  # a parser names the file too, which a long path leaves no room for
        cause = format_error(error).replace(f' "{path}",', "")
    return ConfigError(
        f"{path} cannot be read: {cause}.",
        f"correct it, or put it away: {format_shell('mv', path, f'{path}.old')}; and {EXPORT}",
    )
