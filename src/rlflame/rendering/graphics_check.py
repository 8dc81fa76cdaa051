"""The finding about this machine's renderers. Must not know: Flame."""

from __future__ import annotations

from typing import Any

from rlflame.fleet.flame.check.findings import Finding, ok, warning
from rlflame.rendering.gl_backend import BACKENDS, DRAW, TRY_S, Trials, advice
from rlflame.text import format_count


class GraphicsCheck:
    """Tries every renderer from the start on, while other things are looked at."""

    def __init__(self, code: str = DRAW, timeout_s: float = TRY_S) -> None:
        self._trials = Trials(code=code, timeout_s=timeout_s)

    def finding(self) -> Finding:
        tried = self._trials.reasons()
        works = [backend for backend, reason in tried.items() if not reason]
        reasons = {backend: reason for backend, reason in tried.items() if reason}
        facts: dict[str, Any] = {"works": works, "reasons": reasons}
        if works:
            return ok("graphics", f"works here: MUJOCO_GL={', '.join(works)}", **facts)
        return warning(
            "graphics",
            f"none of {format_count(len(BACKENDS), 'renderer')} works here, so nothing can be "
            "drawn; "
            "training needs none",
            advice(),
            notes=[f"{backend}: {reason}" for backend, reason in reasons.items()],
            **facts,
        )

    def close(self) -> None:
        self._trials.close()
