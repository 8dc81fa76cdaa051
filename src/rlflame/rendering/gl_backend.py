"""Finds a working MuJoCo renderer by trying each one in a child process.

The renderer that worked last is stored in a cache folder. The next search tries it before all
others except the user's choice. The search does not import MuJoCo or change environment variables
in this process.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlflame.errors import RlflameError
from rlflame.rollout.process.channel import MessageKind, ProtocolError
from rlflame.rollout.process.worker_process import WorkerProcess

if TYPE_CHECKING:
    from rlflame.fleet.flame.check.findings import Finding

BACKENDS = ("cgl", "glfw") if sys.platform == "darwin" else ("egl", "osmesa", "glfw")
PROBE_TIMEOUT_S = 30.0
VARIABLE = "MUJOCO_GL"
CHILD_MODULE = "rlflame.rendering.process_main"
_EXIT_GRACE_S = 5.0
#: The commands that install Mesa, which draws without a GPU, by family of Linux distributions.
_INSTALL = {
    "debian": "apt-get install -y libegl1 libgl1",
    "fedora": "dnf install -y mesa-libEGL mesa-libGL mesa-dri-drivers",
    "suse": "zypper install -y Mesa-libEGL1 Mesa-libGL1 Mesa-dri",
    "arch": "pacman -S --noconfirm mesa",
    "alpine": "apk add mesa-egl mesa-gl mesa-dri-gallium",
}


class GraphicsUnavailableError(RlflameError):
    """Raised when a renderer, or every renderer, does not work on this machine."""


def make_backend_variables(backend: str) -> dict[str, str]:
    """Return the environment variables of a process that uses this renderer."""
    platform = backend if backend in ("egl", "osmesa") else ""
    return {VARIABLE: backend, "PYOPENGL_PLATFORM": platform}


def check_graphics(module: str = CHILD_MODULE, timeout_s: float = PROBE_TIMEOUT_S) -> Finding:
    """Try all renderers for the cluster check; each process may crash or hang."""
    from rlflame.fleet.flame.check.findings import Finding

    processes: dict[str, WorkerProcess] = {}
    try:
        for backend in BACKENDS:
            # glfw starts a process when it is imported.
            variables = {**make_backend_variables(backend), "PYTHONSAFEPATH": "1"}
            processes[backend] = WorkerProcess(module=module, environment=variables)
            processes[backend].channel.send(MessageKind.ORDER)
        failures = {name: _find_failure(trial, timeout_s) for name, trial in processes.items()}
    finally:
        for process in processes.values():
            process.terminate()
    working = [backend for backend, reason in failures.items() if not reason]
    reasons = {backend: reason for backend, reason in failures.items() if reason}
    facts = {"works": working, "reasons": reasons}
    if working:
        return Finding("graphics", "ok", f"works here: MUJOCO_GL={', '.join(working)}", facts=facts)
    text = "no renderer works here, so nothing can be rendered; training needs no renderer"
    notes = tuple(f"{backend}: {reason}" for backend, reason in reasons.items())
    return Finding("graphics", "warning", text, (find_install_command(),), notes, facts)


def _find_failure(process: WorkerProcess, timeout_s: float) -> str:
    """Return the reason why a renderer does not work, or "" if it works."""
    try:
        with contextlib.suppress(EOFError, ProtocolError):
            process.channel.receive(timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    code = process.terminate(_EXIT_GRACE_S)
    lines = process.read_output().strip().splitlines()
    reason = lines[-1][:200] if lines else f"exit code {code}"
    return reason if code else ""


def list_backends(environment: Mapping[str, str] = os.environ) -> list[str]:
    """List the renderers: the user's choice, the one that worked last, and the rest."""
    try:
        latest = find_memory(environment).read_text("utf-8")
    except (OSError, ValueError):
        latest = ""
    choice = environment.get(VARIABLE, "").lower()
    return sorted(BACKENDS, key=lambda backend: (backend != choice, backend != latest))


def store_backend(backend: str, environment: Mapping[str, str] = os.environ) -> None:
    """Store the renderer that worked. A failure only slows down the next search."""
    path = find_memory(environment)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(backend, "utf-8")


def find_memory(environment: Mapping[str, str]) -> Path:
    """Return the path of the cache file.

    A relative XDG_CACHE_HOME is ignored, as the XDG specification requires.
    """
    root = Path(environment.get("XDG_CACHE_HOME", ""))
    root = root if root.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return root / "rlflame" / "renderer"


def find_install_command() -> str:
    """Return how to install a renderer on this system: a command or an instruction."""
    if sys.platform == "darwin":
        return "log in on the Mac's screen once: macOS renders only if a window server is running"
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    families = f"{release.get('ID', '')} {release.get('ID_LIKE', '')}"
    for family, command in _INSTALL.items():
        if family in families:
            return command
    return "install Mesa's libEGL and libGL with this system's package manager"
