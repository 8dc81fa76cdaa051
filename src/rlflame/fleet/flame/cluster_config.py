"""The configuration of a Flame cluster, and the errors that name what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlflame.errors import ConfigError, FleetUnreachableError, format_shell

from .timed_call import format_error

UP = "docker compose -f compose/compose.yaml up -d"
EXPORT = "export FLAME_ENDPOINT=http://127.0.0.1:8080 FLAME_CACHE_ENDPOINT=grpc://127.0.0.1:9090"
DEFAULT = "flamepy's default"
_INSTALL = "pip install 'flamepy>=0.6.0,<0.7'"


@dataclass(frozen=True, slots=True)
class FlameServer:
    """One of the two servers that a driver calls, and how its address is written."""

    role: str
    variable: str
    schemes: tuple[str, ...]
    port: int
    #: Starts it on this machine.
    start_command: str

    @property
    def example(self) -> str:
        return f"{self.schemes[0]}://HOST:{self.port}"


MANAGER = FlameServer("session manager", "FLAME_ENDPOINT", ("http", "https"), 8080, UP)
CACHE = FlameServer(
    "object cache",
    "FLAME_CACHE_ENDPOINT",
    ("grpc", "grpcs", "grpc+tls"),
    9090,
    f"{UP} object-cache",
)


class FlameConfigError(ConfigError):
    """A configuration that cannot be used; `fixes` are the advice of cluster-check."""

    def __init__(self, message: str, hint: str, *fixes: str) -> None:
        super().__init__(message, hint)
        self.fixes = fixes or (hint,)


class FlameConnectError(FleetUnreachableError):
    """A server that does not answer; `fixes` are the advice of cluster-check."""

    def __init__(
        self,
        server: FlameServer,
        endpoint: str,
        message: str,
        hint: str,
        fixes: Sequence[str],
        detail: str = "",
    ) -> None:
        source = find_source(server, endpoint)
        if source == DEFAULT:
            message += f" It is {source}: {server.variable} is not set."
            hint = f"export {server.variable}={server.example}; {hint}"
        else:
            message += f" It is configured in {source}."
        super().__init__(message, hint, detail)
        self.fixes = tuple(fixes)


def find_configuration() -> str | None:
    """Where a cluster is configured, or None."""
    if os.environ.get("FLAME_ENDPOINT"):
        return "FLAME_ENDPOINT"
    path = get_config_path()
    return path if os.path.exists(path) else None


def get_config_path() -> str:
    return os.path.join(os.path.expanduser("~"), ".flame", "flame.yaml")


def find_source(server: FlameServer, endpoint: str) -> str:
    """Where this server's address comes from: the variable, else the file, else flamepy."""
    if server.variable in os.environ:
        return server.variable
    return get_config_path() if endpoint in _read_config() else DEFAULT


def _read_config() -> str:
    try:
        with open(get_config_path(), encoding="utf-8") as config_file:
            return config_file.read()
    except (OSError, UnicodeError):
        return ""


def is_local(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def check_endpoint(server: FlameServer, endpoint: str) -> None:
    """Raises FlameConfigError if this is not an address of such a server."""
    try:
        parts = urlsplit(endpoint)
        host, scheme = parts.hostname, parts.scheme
        port_is_good = parts.port != 0
    except ValueError:  # brackets that do not close, or a port that is no number up to 65535
        host, scheme, port_is_good = None, endpoint.partition("://")[0], False
    suggestion = server.example
    if endpoint and "://" not in endpoint:
        problem = "has no scheme"
        suggestion = f"{server.schemes[0]}://{endpoint}"
    elif endpoint and scheme not in server.schemes:
        expected = f"{server.schemes[0]}:// or {server.schemes[1]}://"
        problem = f"begins with {scheme}://, where the {server.role}'s begins with {expected}"
    elif endpoint and not port_is_good:
        problem = "has no good port: a number from 1 to 65535 is wanted"
    elif not host:
        problem = "names no host"
    else:
        return
    name = "Flame endpoint" if server is MANAGER else "Flame cache endpoint"
    raise FlameConfigError(
        f"The {name} {endpoint!r} in {find_source(server, endpoint)} {problem}.",
        f"write {suggestion}",
        f"export {server.variable}={suggestion}",
    )


def make_unconfigured_error(
    instead: str = "--local runs it on this machine.",
) -> FleetUnreachableError:
    return FleetUnreachableError(
        f"No Flame cluster is configured, and none is needed: {instead}",
        f"to bring up a cluster here, in containers: {UP} && {EXPORT}",
    )


def make_import_error(error: ImportError) -> FlameConfigError:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "flamepy":
        return FlameConfigError("flamepy is not installed.", _INSTALL)
    return FlameConfigError(f"flamepy cannot be imported: {format_error(error)}.", _INSTALL)


def make_unreadable_error(error: Exception) -> FlameConfigError:
    """flamepy reads the file before the variables, so a broken file is always in the way."""
    path = get_config_path()
    lines = [line.partition("#")[0].strip() for line in _read_config().splitlines()]
    if not isinstance(error, (AttributeError, KeyError, TypeError)):
        # A parser names the file too, which a long path leaves no room for.
        cause = " ".join(str(error).split()).rstrip(".").replace(f' "{path}",', "")
    elif not any(line.strip("-.") for line in lines):
        cause = "it is empty"
    else:
        cause = "it is not laid out as Flame's configuration is"
    return FlameConfigError(
        f"{path} cannot be read: {cause}.",
        f"correct it, or put it away: {format_shell('mv', path, f'{path}.old')}; and {EXPORT}",
    )
