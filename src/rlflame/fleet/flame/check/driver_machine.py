"""What this machine is: processors, memory and versions.

Must not know: Flame.
"""

from __future__ import annotations

import os

from rlflame.fleet.flame.check.findings import Finding, make_ok
from rlflame.rollout import blas
from rlflame.rollout.machine import count_usable_cores, describe_host


def check_machine() -> Finding:
    machine_info = describe_host()
    usable, threads = count_usable_cores(), os.cpu_count() or 1
    total = f" of {threads}" if usable != threads else ""
    packages = ", ".join(
        f"{name} {machine_info['packages'].get(name, 'absent')}"
        for name in ("numpy", "gymnasium", "mujoco")
    )
    return make_ok(
        "this machine",
        f"{machine_info['host']}: {usable}{total} {'processor' if threads == 1 else 'processors'}, "
        f"{machine_info['memory_bytes'] / (1 << 30):.1f} GiB, {machine_info['processor']}, Python "
        f"{machine_info['python']}, {packages}",
        **{
            **machine_info,
            "usable_processors": usable,
            "processors": threads,
            "blas": blas.read_core_name(),
        },
    )
