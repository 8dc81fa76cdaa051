"""Which of MuJoCo's renderers works on this machine: each is tried in a child process.

What worked is remembered in a cache folder. This process's own environment is never touched, and
MuJoCo never imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlflame.errors import ConfigError, RlflameError
from rlflame.rollout.process.channel import MessageKind, ProtocolError
from rlflame.rollout.process.worker_process import WorkerProcess

if TYPE_CHECKING:
    from rlflame.fleet.flame.check.findings import Finding

BACKENDS = ("cgl", "glfw") if sys.platform == "darwin" else ("egl", "osmesa", "glfw")
PROBE_TIMEOUT_S = 30.0
VARIABLE = "MUJOCO_GL"
_PROBE_MODULE = "rlflame.rendering.process_main"
_EXIT_GRACE_S = 5.0
_OS_RELEASE = Path("/etc/os-release")
#: Mesa draws without a graphics card; by the system's family, how it is installed.
_INSTALL = {
    "debian": "apt-get install -y libegl1 libgl1",
    "fedora": "dnf install -y mesa-libEGL mesa-libGL mesa-dri-drivers",
    "rhel": "dnf install -y mesa-libEGL mesa-libGL mesa-dri-drivers",
    "suse": "zypper install -y Mesa-libEGL1 Mesa-libGL1 Mesa-dri",
    "arch": "pacman -S --noconfirm mesa",
    "alpine": "apk add mesa-egl mesa-gl mesa-dri-gallium",
}


class GraphicsUnavailableError(RlflameError):
    """No renderer works here."""


def make_backend_variables(backend: str) -> dict[str, str]:
    """What a process that draws with this renderer needs in its environment."""
    named = backend if backend in ("egl", "osmesa") else ""
    return {VARIABLE: backend, "PYOPENGL_PLATFORM": named}


class BackendProbe:
    """Trials of renderers, all at once; each process may crash or hang."""

    def __init__(
        self,
        backends: Sequence[str] = BACKENDS,
        module: str = _PROBE_MODULE,
        timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._processes: dict[str, WorkerProcess] = {}
        # glfw starts a process while it loads.
        safe_path = {"PYTHONSAFEPATH": "1"}
        for backend in backends:
            variables = {**make_backend_variables(backend), **safe_path}
            process = WorkerProcess(module=module, environment=variables)
            process.channel.send(MessageKind.ORDER)
            self._processes[backend] = process

    def find_failures(self) -> dict[str, str]:
        """Why each one does not work; empty for one that does."""
        try:
            return {name: self._find_failure(trial) for name, trial in self._processes.items()}
        finally:
            self.close()

    def _find_failure(self, process: WorkerProcess) -> str:
        try:
            with contextlib.suppress(EOFError, ProtocolError):
                process.channel.receive(self._timeout_s)
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        code = process.terminate(_EXIT_GRACE_S)
        lines = process.read_output().strip().splitlines()
        reason = lines[-1][:200] if lines else f"ended with {code}"
        return reason if code else ""

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()


def check_graphics(module: str = _PROBE_MODULE, timeout_s: float = PROBE_TIMEOUT_S) -> Finding:
    """Try every renderer for the cluster check."""
    from rlflame.fleet.flame.check.findings import Finding

    failures = BackendProbe(module=module, timeout_s=timeout_s).find_failures()
    working = [backend for backend, reason in failures.items() if not reason]
    reasons = {backend: reason for backend, reason in failures.items() if reason}
    facts = {"works": working, "reasons": reasons}
    if working:
        seen = f"works here: MUJOCO_GL={', '.join(working)}"
        return Finding("graphics", "ok", seen, facts=facts)
    seen = "no renderer works here, so nothing can be drawn; training needs none"
    notes = tuple(f"{backend}: {reason}" for backend, reason in reasons.items())
    return Finding("graphics", "warning", seen, (find_install_command(),), notes, facts)


def is_gl_failure(error: BaseException) -> bool:
    """Whether MuJoCo does not load with the renderer that its variable names."""
    if not os.environ.get(VARIABLE) or "mujoco" in sys.modules:
        return False
    seen: BaseException | None = error
    while seen is not None:
        for frame, _ in traceback.walk_tb(seen.__traceback__):
            if str(frame.f_globals.get("__name__")).partition(".")[0] == "mujoco":
                return True
        seen = seen.__cause__ or seen.__context__
    return False


def make_gl_failure_error(
    reason: str, make_probe: Callable[[], BackendProbe] = BackendProbe
) -> ConfigError:
    """The error of such a failure, with the renderers that work."""
    working = [backend for backend, why in make_probe().find_failures().items() if not why]
    suggestion = (
        f"of which {' and '.join(working) or 'none'} {'work' if working[1:] else 'works'} here"
    )
    return ConfigError(
        f"MuJoCo cannot be loaded with {VARIABLE}={os.environ.get(VARIABLE, '')!r}: {reason}.",
        f"unset {VARIABLE}: rlflame finds a renderer itself. It may also be disable, for what "
        f"draws nothing, or {', '.join(BACKENDS)}, {suggestion}"
        + ("" if working else f": {find_install_command()}"),
    )


def probe_backend(backend: str) -> str:
    """Why a renderer does not work here; empty if it does."""
    return BackendProbe((backend,)).find_failures()[backend]


class BackendFinder:
    """Finds the first renderer that works, and remembers it for this machine."""

    def __init__(
        self,
        probe: Callable[[str], str] = probe_backend,
        cache_path: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._probe = probe
        self._environment = environment
        self._cache_path = cache_path or find_cache_folder(environment) / "graphics.json"
        #: Whether the last answer was remembered rather than tried.
        self.is_cached = False

    def find(self) -> str:
        """The renderer to use. One that the user has named is tried before all others."""
        preferred = self._environment.get(VARIABLE, "").lower()
        cached = self._read_cache().get(self._make_machine_key(), "")
        self.is_cached = cached in BACKENDS and preferred in ("", cached)
        if self.is_cached:
            return str(cached)
        reasons: dict[str, str] = {}
        for backend in sorted(BACKENDS, key=lambda name: name != preferred):
            reasons[backend] = self._probe(backend)
            if not reasons[backend]:
                self._store(backend)
                return backend
        raise GraphicsUnavailableError(
            "MuJoCo cannot draw on this machine: "
            + "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
            + ".",
            find_install_command(),
        )

    def forget(self) -> None:
        """What was remembered does not work any more."""
        self._store("")

    def _make_machine_key(self) -> str:
        """A home folder may be shared by machines, and one machine have a display or none."""
        display = (
            self._environment.get("DISPLAY") or self._environment.get("WAYLAND_DISPLAY") or "-"
        )
        return f"{platform.node()} {platform.machine()} {sys.prefix} {display}"

    def _read_cache(self) -> dict[str, str]:
        try:
            backends = json.loads(self._cache_path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return backends if isinstance(backends, dict) else {}

    def _store(self, backend: str) -> None:
        """A memory that cannot be written costs a second next time, and nothing else."""
        backends = {**self._read_cache(), self._make_machine_key(): backend}
        temporary = self._cache_path.with_name(f".{self._cache_path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            self._cache_path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(backends, indent=2) + "\n", "utf-8")
            temporary.replace(self._cache_path)


def find_cache_folder(environment: Mapping[str, str]) -> Path:
    """By the rules of freedesktop.org: a relative path in the variable does not count."""
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    root = named if named.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return root / "rlflame"


def find_install_command(release: Path = _OS_RELEASE) -> str:
    """How to install a renderer on this system."""
    if sys.platform == "darwin":
        return "log in at the screen once: macOS draws only with a window server"
    try:
        lines = release.read_text("utf-8").splitlines()
    except OSError:
        lines = []
    fields = {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in lines)}
    families = [fields.get("ID", ""), *fields.get("ID_LIKE", "").split()]
    for family in families:
        for name, command in _INSTALL.items():
            if name in family:
                return command
    return "install Mesa's libEGL and libGL with this system's package manager"
