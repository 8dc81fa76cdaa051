"""What this machine is: processors, memory, versions, and which renderers really work.

Must not know: Flame.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

from rlflame.doctor import Finding, ok, warning
from rlflame.facts import count
from rlflame.rollout import blas
from rlflame.rollout.greeting import greeting

BACKENDS = ("cgl", "glfw") if sys.platform == "darwin" else ("egl", "osmesa", "glfw")
_TRY_S = 30.0
#: A context, and MuJoCo's own functions in it: a library may be there and yet not do.
_DRAW = """
import mujoco
context = mujoco.GLContext(64, 64)
context.make_current()
mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), mujoco.mjtFontScale.mjFONTSCALE_100)
context.free()
"""


def machine() -> Finding:
    here = greeting()
    usable, threads = blas.usable_cores(), os.cpu_count() or 1
    of = f" of {threads}" if usable != threads else ""
    packages = ", ".join(
        f"{name} {here['packages'].get(name, 'absent')}"
        for name in ("numpy", "gymnasium", "mujoco")
    )
    return ok(
        "this machine",
        f"{here['host']}: {usable}{of} {'processor' if threads == 1 else 'processors'}, "
        f"{here['memory_bytes'] / (1 << 30):.1f} GiB, {here['processor']}, Python "
        f"{here['python']}, {packages}",
        **{**here, "usable_processors": usable, "processors": threads, "blas": blas.core_name()},
    )


class Graphics:
    """Tries every renderer in a process of its own, which may crash or hang."""

    def __init__(self, code: str = _DRAW, timeout_s: float = _TRY_S) -> None:
        self._timeout_s = timeout_s
        self._tries = {
            backend: subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, "MUJOCO_GL": backend},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            for backend in BACKENDS
        }

    def finding(self) -> Finding:
        works, reasons = [], {}
        for backend, process in self._tries.items():
            try:
                _, errors = process.communicate(timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                reasons[backend] = f"no answer within {self._timeout_s:g} s"
                continue
            if process.returncode == 0:
                works.append(backend)
            else:
                lines = errors.decode(errors="replace").strip().splitlines()
                reasons[backend] = lines[-1][:200] if lines else f"ended with {process.returncode}"
        self.close()
        facts: dict[str, Any] = {"works": works, "reasons": reasons}
        if works:
            return ok("graphics", f"works here: MUJOCO_GL={', '.join(works)}", **facts)
        return warning(
            "graphics",
            f"none of {count(len(BACKENDS), 'renderer')} works here, so nothing can be drawn; "
            "training needs none",
            "apt-get install libosmesa6, or libegl1 with a driver; then MUJOCO_GL=osmesa or egl",
            notes=[f"{backend}: {reason}" for backend, reason in reasons.items()],
            **facts,
        )

    def close(self) -> None:
        for process in self._tries.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
