"""Which of MuJoCo's renderers works on this machine: each tried in a process of its own.

What worked is remembered in a cache folder. This process's own environment is never touched, and
MuJoCo never imported. Must not know: what is drawn, who asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlflame.errors import ConfigError, RlflameError
from rlflame.rollout.search_path import child_path

BACKENDS = ("cgl", "glfw") if sys.platform == "darwin" else ("egl", "osmesa", "glfw")
TRY_S = 30.0
VARIABLE = "MUJOCO_GL"
#: A context, and MuJoCo's own functions in it: a library may be there and yet not do.
DRAW = """
import mujoco
context = mujoco.GLContext(64, 64)
context.make_current()
mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), mujoco.mjtFontScale.mjFONTSCALE_100)
context.free()
"""
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


class GraphicsUnavailable(RlflameError):
    """No renderer works here."""


def variables(backend: str) -> dict[str, str]:
    """What a process that draws with this renderer needs in its environment."""
    named = backend if backend in ("egl", "osmesa") else ""
    return {VARIABLE: backend, "PYOPENGL_PLATFORM": named}


class Trials:
    """Renderers being tried, all at once; a process may crash or hang and nothing else does."""

    def __init__(
        self, backends: Sequence[str] = BACKENDS, code: str = DRAW, timeout_s: float = TRY_S
    ) -> None:
        self._timeout_s = timeout_s
        self._processes = {
            backend: subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                env={
                    **os.environ,
                    **variables(backend),
                    "PYTHONPATH": child_path(),
                    "PYTHONSAFEPATH": "1",  # for the process that glfw starts while it loads
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            for backend in backends
        }

    def reasons(self) -> dict[str, str]:
        """Why each one does not work; empty for one that does."""
        found = {}
        for backend, process in self._processes.items():
            try:
                _, errors = process.communicate(timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                found[backend] = f"no answer within {self._timeout_s:g} s"
                continue
            lines = errors.decode(errors="replace").strip().splitlines()
            said = lines[-1][:200] if lines else f"ended with {process.returncode}"
            found[backend] = said if process.returncode else ""
        self.close()
        return found

    def close(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


def hindered(error: BaseException) -> bool:
    """Whether this is MuJoCo, which does not load with the renderer that its variable names."""
    if not os.environ.get(VARIABLE) or "mujoco" in sys.modules:
        return False
    seen: BaseException | None = error
    while seen is not None:
        for frame, _ in traceback.walk_tb(seen.__traceback__):
            if str(frame.f_globals.get("__name__")).partition(".")[0] == "mujoco":
                return True
        seen = seen.__cause__ or seen.__context__
    return False


def hindrance(reason: str, trials: Callable[[], Trials] = Trials) -> ConfigError:
    """What to say of it. Others are tried: whoever sets the variable wants to know what works."""
    trying = trials()
    try:
        works = [backend for backend, why in trying.reasons().items() if not why]
    finally:
        trying.close()
    found = f"of which {' and '.join(works) or 'none'} {'work' if works[1:] else 'works'} here"
    return ConfigError(
        f"MuJoCo cannot be loaded with {VARIABLE}={os.environ.get(VARIABLE, '')!r}: {reason}.",
        f"unset {VARIABLE}: rlflame finds a renderer itself. It may also be disable, for what "
        f"draws nothing, or {', '.join(BACKENDS)}, {found}" + ("" if works else f": {advice()}"),
    )


def tried(backend: str) -> str:
    """Why a renderer does not work here; empty if it does."""
    trials = Trials((backend,))
    try:
        return trials.reasons()[backend]
    finally:
        trials.close()


class Finder:
    """Finds the first renderer that works, and remembers it for this machine."""

    def __init__(
        self,
        trial: Callable[[str], str] = tried,
        memory: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._trial = trial
        self._environment = environment
        self._memory = memory or cache_folder(environment) / "graphics.json"
        #: Whether the last answer was remembered rather than tried.
        self.remembered = False

    def find(self) -> str:
        """The renderer to use. One that the user has named is tried before all others."""
        wish = self._environment.get(VARIABLE, "").lower()
        known = self._recall().get(self._machine(), "")
        self.remembered = known in BACKENDS and wish in ("", known)
        if self.remembered:
            return str(known)
        reasons: dict[str, str] = {}
        for backend in sorted(BACKENDS, key=lambda name: name != wish):
            reasons[backend] = self._trial(backend)
            if not reasons[backend]:
                self._remember(backend)
                return backend
        raise GraphicsUnavailable(
            "MuJoCo cannot draw on this machine: "
            + "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
            + ".",
            advice(),
        )

    def forget(self) -> None:
        """What was remembered does not work any more."""
        self._write({k: v for k, v in self._recall().items() if k != self._machine()})

    def _machine(self) -> str:
        """A home folder may be shared by machines, and one machine have a display or none."""
        shown = self._environment.get("DISPLAY") or self._environment.get("WAYLAND_DISPLAY") or "-"
        return f"{platform.node()} {platform.machine()} {sys.prefix} {shown}"

    def _recall(self) -> dict[str, str]:
        try:
            found = json.loads(self._memory.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _remember(self, backend: str) -> None:
        self._write({**self._recall(), self._machine(): backend})

    def _write(self, known: dict[str, str]) -> None:
        """A memory that cannot be written costs a second next time, and nothing else."""
        temporary = self._memory.with_name(f".{self._memory.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(known, indent=2) + "\n", "utf-8")
            temporary.replace(self._memory)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """By the rules of freedesktop.org: a relative path in the variable does not count."""
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    root = named if named.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return root / "rlflame"


def advice(release: Path = _OS_RELEASE) -> str:
    """How to install a renderer on this system."""
    if sys.platform == "darwin":
        return "log in at the screen once: macOS draws only with a window server"
    try:
        lines = release.read_text("utf-8").splitlines()
    except OSError:
        lines = []
    said = {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in lines)}
    families = [said.get("ID", ""), *said.get("ID_LIKE", "").split()]
    for family in families:
        for name, command in _INSTALL.items():
            if family == name or (family == "ubuntu" and name == "debian"):
                return command
            if name == "suse" and "suse" in family:
                return command
    return "install Mesa's libEGL and libGL with this system's package manager"
