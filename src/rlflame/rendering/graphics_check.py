"""The finding about this machine's renderers. Must not know: Flame."""

from __future__ import annotations

from typing import Any

from rlflame.fleet.flame.check.findings import Finding, make_ok, make_warning
from rlflame.rendering.gl_backend import (
    BACKENDS,
    PROBE_CODE,
    PROBE_TIMEOUT_S,
    BackendProbe,
    find_install_command,
)
from rlflame.terminal_text import format_count


class GraphicsCheck:
    """Tries every renderer from the start on, while other things are looked at."""

    def __init__(self, code: str = PROBE_CODE, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._probe = BackendProbe(code=code, timeout_s=timeout_s)

    def make_finding(self) -> Finding:
        failures = self._probe.find_failures()
        working = [backend for backend, reason in failures.items() if not reason]
        reasons = {backend: reason for backend, reason in failures.items() if reason}
        facts: dict[str, Any] = {"works": working, "reasons": reasons}
        if working:
            return make_ok("graphics", f"works here: MUJOCO_GL={', '.join(working)}", **facts)
        return make_warning(
            "graphics",
            f"none of {format_count(len(BACKENDS), 'renderer')} works here, so nothing can be "
            "drawn; "
            "training needs none",
            find_install_command(),
            notes=[f"{backend}: {reason}" for backend, reason in reasons.items()],
            **facts,
        )

    def close(self) -> None:
        self._probe.close()
