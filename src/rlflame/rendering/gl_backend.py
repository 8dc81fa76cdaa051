"""Which of MuJoCo's renderers works on this machine: each is tried in a child process.

The one that worked last is remembered in a cache folder, and tried first the next time. This
process's own environment is never touched, and MuJoCo never imported.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlflame.errors import RlflameError
from rlflame.rollout.process.channel import MessageKind, ProtocolError
from rlflame.rollout.process.worker_process import WorkerProcess
from rlflame.terminal_text import format_count

if TYPE_CHECKING:
    from rlflame.fleet.flame.check.findings import Finding

BACKENDS = ("cgl", "glfw") if sys.platform == "darwin" else ("egl", "osmesa", "glfw")
PROBE_TIMEOUT_S = 30.0
VARIABLE = "MUJOCO_GL"
CHILD_MODULE = "rlflame.rendering.process_main"
_EXIT_GRACE_S = 5.0
#: Mesa draws without a graphics card; by the system's family, how it is installed.
_INSTALL = {
    "debian": "apt-get install -y libegl1 libgl1",
    "fedora": "dnf install -y mesa-libEGL mesa-libGL mesa-dri-drivers",
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
        module: str = CHILD_MODULE,
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

    def make_finding(self) -> Finding:
        """The answer of the cluster check."""
        from rlflame.fleet.flame.check.findings import Check

        failures = self.find_failures()
        working = [backend for backend, reason in failures.items() if not reason]
        reasons = {backend: reason for backend, reason in failures.items() if reason}
        check = Check("graphics", works=working, reasons=reasons)
        if working:
            return check.make_ok(f"works here: MUJOCO_GL={', '.join(working)}")
        return check.make_warning(
            f"none of {format_count(len(BACKENDS), 'renderer')} works here, so nothing can be "
            "drawn; training needs none",
            find_install_command(),
            notes=[f"{backend}: {reason}" for backend, reason in reasons.items()],
        )

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()


def list_backends(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The renderers as they are tried: the user's choice, then the one that worked last."""
    try:
        latest = find_memory(environment).read_text("utf-8")
    except (OSError, ValueError):
        latest = ""
    preferred = environment.get(VARIABLE, "").lower()
    return sorted(BACKENDS, key=lambda backend: (backend != preferred, backend != latest))


def store_backend(backend: str, environment: Mapping[str, str] = os.environ) -> None:
    """A memory that cannot be written costs a second next time, and nothing else."""
    path = find_memory(environment)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(backend, "utf-8")


def find_memory(environment: Mapping[str, str]) -> Path:
    """By the rules of freedesktop.org: a relative path in the variable does not count."""
    root = Path(environment.get("XDG_CACHE_HOME", ""))
    root = root if root.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return root / "rlflame" / "renderer"


def find_install_command() -> str:
    """How to install a renderer on this system."""
    if sys.platform == "darwin":
        return "log in at the screen once: macOS draws only with a window server"
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    families = f"{release.get('ID', '')} {release.get('ID_LIKE', '')}"
    for family, command in _INSTALL.items():
        if family in families:
            return command
    return "install Mesa's libEGL and libGL with this system's package manager"
