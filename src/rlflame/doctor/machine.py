"""What this machine is: processors, memory, versions, and which renderers really work.

Must not know: Flame.
"""

from __future__ import annotations

import os
from typing import Any

from rlflame.doctor import Finding, ok, warning
from rlflame.facts import count
from rlflame.graphics import BACKENDS, DRAW, TRY_S, Trials, advice
from rlflame.rollout import blas
from rlflame.rollout.greeting import greeting


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
            f"none of {count(len(BACKENDS), 'renderer')} works here, so nothing can be drawn; "
            "training needs none",
            advice(),
            notes=[f"{backend}: {reason}" for backend, reason in reasons.items()],
            **facts,
        )

    def close(self) -> None:
        self._trials.close()
