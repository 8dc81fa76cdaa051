"""What this machine is: processors, memory and versions.

Must not know: Flame.
"""

from __future__ import annotations

import os

from rlflame.fleet.flame.check.findings import Finding, ok
from rlflame.rollout import blas
from rlflame.rollout.machine import greeting


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
