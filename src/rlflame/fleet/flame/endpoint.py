"""Where a Flame cluster is configured, and what is wrong with what stands there.

Must not know: connections, flamepy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlflame.errors import ConfigError, FleetUnreachable, shell

from .timeouts import said

UP = "docker compose -f compose/compose.yaml up -d"
EXPORT = "export FLAME_ENDPOINT=http://127.0.0.1:8080 FLAME_CACHE_ENDPOINT=grpc://127.0.0.1:9090"
DEFAULT = "flamepy's default"
_INSTALL = "pip install 'flamepy>=0.6.0,<0.7'"


@dataclass(frozen=True, slots=True)
class Server:
    """One of the two that a driver talks to, and how its address is written."""

    what: str
    variable: str
    schemes: tuple[str, ...]
    port: int

    @property
    def example(self) -> str:
        return f"{self.schemes[0]}://HOST:{self.port}"


MANAGER = Server("session manager", "FLAME_ENDPOINT", ("http", "https"), 8080)
CACHE = Server("object cache", "FLAME_CACHE_ENDPOINT", ("grpc", "grpcs", "grpc+tls"), 9090)


class Misconfigured(ConfigError):
    """`fixes` are what cluster-check advises."""

    def __init__(self, message: str, hint: str, *fixes: str) -> None:
        super().__init__(message, hint)
        self.fixes = fixes or (hint,)


def configured() -> str | None:
    """Where a cluster is configured, or None."""
    if os.environ.get("FLAME_ENDPOINT"):
        return "FLAME_ENDPOINT"
    path = file()
    return path if os.path.exists(path) else None


def file() -> str:
    return os.path.join(os.path.expanduser("~"), ".flame", "flame.yaml")


def source(server: Server, endpoint: str) -> str:
    """Where this server's address comes from: the variable, else the file, else flamepy."""
    if server.variable in os.environ:
        return server.variable
    try:
        with open(file(), encoding="utf-8") as found:
            return file() if endpoint in found.read() else DEFAULT
    except (OSError, UnicodeError):
        return DEFAULT


def check(server: Server, endpoint: str) -> None:
    """Raises Misconfigured where this is no address of such a server."""
    where = f"in {source(server, endpoint)}"
    name = "Flame endpoint" if server is MANAGER else "Flame cache endpoint"
    if endpoint and "://" not in endpoint:
        better = f"{server.schemes[0]}://{endpoint}"
        raise Misconfigured(
            f"The {name} {endpoint!r} {where} has no scheme.",
            f"write {better}",
            f"export {server.variable}={better}",
        )
    try:
        parts = urlsplit(endpoint)
        host, scheme = parts.hostname, parts.scheme
        port_is_good = parts.port != 0
    except ValueError:  # brackets that do not close, or a port that is no number up to 65535
        host, scheme, port_is_good = None, endpoint.partition("://")[0], False
    wanted = f"{server.schemes[0]}:// or {server.schemes[1]}://"
    if endpoint and scheme not in server.schemes:
        problem = f"begins with {scheme}://, where the {server.what}'s begins with {wanted}"
    elif endpoint and not port_is_good:
        problem = "has no good port: a number from 1 to 65535 is wanted"
    elif not host:
        problem = "names no host"
    else:
        return
    raise Misconfigured(
        f"The {name} {endpoint!r} {where} {problem}.",
        f"write one like {server.example}",
        f"export {server.variable}={server.example}",
    )


def authority(endpoint: str, ca_file: str | None) -> str:
    """What to say of an encrypted address that is tried with the system's authorities alone."""
    if ca_file or urlsplit(endpoint).scheme not in ("https", "grpcs", "grpc+tls"):
        return ""
    return "export FLAME_CA_FILE=ca.crt, where the cluster has a certificate authority of its own"


def unconfigured(instead: str = "--local runs it on this machine.") -> FleetUnreachable:
    """For whoever asks for a cluster without having one."""
    return FleetUnreachable(
        f"No Flame cluster is configured, and none is needed: {instead}",
        f"to bring up a cluster here, in containers: {UP} && {EXPORT}",
    )


def not_importable(error: ImportError) -> Misconfigured:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "flamepy":
        return Misconfigured("flamepy is not installed.", _INSTALL)
    return Misconfigured(f"flamepy cannot be imported: {said(error)}.", _INSTALL)


def unreadable(error: Exception) -> Misconfigured:
    """The variables are read after the file, so a broken file is in their way."""
    path = file()
    if not isinstance(error, (AttributeError, KeyError, TypeError)):
        # A parser names the file too, which a long path leaves no room for.
        cause = " ".join(str(error).split()).rstrip(".").replace(f' "{path}",', "")
    elif _is_blank(path):
        cause = "it is empty"
    else:
        cause = "it is not laid out as Flame's configuration is"
    return Misconfigured(
        f"{path} cannot be read: {cause}.",
        f"correct it, or put it away: {shell('mv', path, f'{path}.old')}; and {EXPORT}",
    )


def _is_blank(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as found:
            lines = [line.partition("#")[0].strip() for line in found]
    except (OSError, UnicodeError):
        return False
    return not any(line.strip("-.") for line in lines)
