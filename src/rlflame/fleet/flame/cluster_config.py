"""Finds the configuration of a Flame cluster, and reports errors in it."""

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
    "try https:// and grpcs:// if TLS is on (set FLAME_CA_FILE to the certificate of a private "
    "authority), http:// and grpc:// if it is off"
)


@dataclass(frozen=True, slots=True)
class FlameServer:
    """A server of a Flame cluster, and the form of its address."""

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
    """A server does not answer. `fixes` are suggestions that cluster-check shows."""

    def __init__(
        self, server: FlameServer, endpoint: str, message: str, fix: str, detail: str = ""
    ) -> None:
        self.fixes = (fix, f"or use another one: export {server.variable}={server.example}")
        message += f" The address comes from {find_source(server, endpoint)}."
        hint = "; ".join([*self.fixes, "rlflame cluster-check", "--local runs on this machine"])
        super().__init__(message, hint, detail)


def find_configuration() -> str | None:
    """Return the variable or the file that configures a cluster, or None."""
    if os.environ.get("FLAME_ENDPOINT"):
        return "FLAME_ENDPOINT"
    path = get_config_path()
    return path if os.path.exists(path) else None


def get_config_path() -> str:
    return os.path.expanduser("~/.flame/flame.yaml")


def find_source(server: FlameServer, endpoint: str) -> str:
    """Return where the address comes from: a variable, a file or flamepy's default."""
    if server.variable in os.environ:
        return server.variable
    with contextlib.suppress(OSError, UnicodeError):
        if endpoint in Path(get_config_path()).read_text("utf-8"):
            return get_config_path()
    return f"flamepy's default, because {server.variable} is not set"


def check_endpoint(server: FlameServer, endpoint: str) -> None:
    """Raise ConfigError unless `endpoint` has the form of the server's address."""
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in server.schemes and parts.hostname and parts.port != 0
    except ValueError:  # an unclosed bracket, or a port that is not a number up to 65535
        is_address = False
    if is_address:
        return
    is_bare = endpoint and "://" not in endpoint
    suggestion = f"{server.schemes[0]}://{endpoint}" if is_bare else server.example
    raise ConfigError(
        f"The address of the {server.role}, {endpoint!r} from {find_source(server, endpoint)}, "
        f"does not have the form {' or '.join(server.schemes)}://HOST:PORT.",
        f"export {server.variable}={suggestion}",
    )


def make_unconfigured_error(
    alternative: str = "--local runs on this machine.",
) -> FleetUnreachableError:
    return FleetUnreachableError(
        f"No Flame cluster is configured. You do not need one: {alternative}",
        f"to start a cluster in containers on this machine: {START} && {EXPORT}",
    )


def make_unreadable_error(error: Exception) -> ConfigError:
    """Return the error for an invalid configuration file, which flamepy always reads."""
    path = get_config_path()
    if isinstance(error, (AttributeError, KeyError, TypeError)):
        cause = "it is empty, or does not have the structure of Flame's configuration"
    else:  # without the path, which the parser repeats
        cause = format_error(error).replace(f' "{path}",', "")
    return ConfigError(
        f"{path} cannot be read: {cause}.",
        f"correct it, or move it away: {format_shell('mv', path, f'{path}.old')}; and {EXPORT}",
    )
