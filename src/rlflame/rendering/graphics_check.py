"""The finding about this machine's renderers."""

from __future__ import annotations

from rlflame.fleet.flame.check.findings import Check, Finding
from rlflame.rendering.gl_backend import (
    BACKENDS,
    PROBE_CODE,
    PROBE_TIMEOUT_S,
    BackendProbe,
    find_install_command,
)
from rlflame.terminal_text import format_count


class GraphicsCheck:
    """Tries every renderer from construction on, while other questions are asked."""

    def __init__(self, code: str = PROBE_CODE, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._probe = BackendProbe(code=code, timeout_s=timeout_s)

    def make_finding(self) -> Finding:
        failures = self._probe.find_failures()
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
        self._probe.close()
