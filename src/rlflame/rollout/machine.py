"""Describes this machine: host, CPU, and the versions that can change results.

This module imports only the standard library, because executors run it before packages are
installed. `read_fingerprint` also imports numpy.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import blas

#: Fingerprint fields that can change the last bits of results. Other fields are informational.
_BIT_FIELDS = ("core", "simd", "system", "libc", "numpy", "gymnasium", "mujoco", "box2d")
#: Fields that affect only gradients, not actions. They are compared if both fingerprints have them.
_GRADIENT_FIELDS = ("torch", "cpu_vendor", "card")
PACKAGES = ("numpy", "gymnasium", "mujoco", "box2d", "flamepy", "torch")


def describe_host() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "processor": blas.read_cpu_field("model name"),
        "cores": count_usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{sys.platform}-{platform.machine()}",
        "libc": "-".join(platform.libc_ver()),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _find_version(name))},
    }


def list_flame_pythons() -> list[str]:
    """List the Python versions, such as 3.12, for which this executor has flamepy.

    With any other version, a worker process ends before it can answer, and Flame never gives up.
    """
    minors = {sys.version_info.minor}
    spec = find_spec("flamepy")
    if spec is not None and spec.origin is not None:
        # FLAME_HOME/lib/python3.12/site-packages/flamepy/__init__.py
        site = Path(spec.origin).parent.parent
        for path in site.parent.parent.glob(f"python3.*/{site.name}/flamepy"):
            minor = path.parent.parent.name.removeprefix("python3.")
            minors |= {int(minor)} if minor.isdecimal() else set()
    return [f"3.{minor}" for minor in sorted(minors)]


def describe_machine() -> dict[str, Any]:
    """Return a description of this machine to store with a measurement."""
    facts = describe_host()
    return {
        **facts,
        "cores": os.cpu_count() or 1,
        "usable_cores": facts["cores"],
        "blas": blas.read_core_name(),
    }


def read_fingerprint() -> dict[str, str]:
    """Return the properties that two machines must share for bit-identical results."""
    import numpy as np

    libc = "-".join(platform.libc_ver())
    # The vector instruction sets that numpy's loops use on this machine.
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})
    return {
        "core": blas.read_core_name(),
        "simd": " ".join(sorted({*simd.get("baseline", []), *simd.get("found", [])})),
        "system": f"{sys.platform}-{platform.machine()}",
        "libc": libc if libc != "-" else platform.release(),
        "numpy": np.__version__,
    }


def read_versions() -> dict[str, str]:
    """Return the fingerprint with the versions of Python and the simulators."""
    packages = {name: _find_version(name) or "absent" for name in ("gymnasium", "mujoco", "box2d")}
    return {"python": platform.python_version(), **read_fingerprint(), **packages}


def find_fingerprint_differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Return the differences that can change results, as `name: a -> b`."""
    gradient_fields = [name for name in _GRADIENT_FIELDS if name in a and name in b]
    return [
        f"{name}: {a.get(name, '?')} -> {b.get(name, '?')}"
        for name in (*_BIT_FIELDS, *gradient_fields)
        if a.get(name) != b.get(name)
    ]


def count_usable_cores() -> int:
    """Return the number of cores that this process may use, rounded up."""
    return max(1, math.ceil(compute_usable_share()))


def compute_usable_share() -> float:
    """Return how many CPU seconds per second this process may use, such as 1.5."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return min(count, _read_quota(Path("/sys/fs/cgroup")))


def _read_quota(root: Path) -> float:
    """Return a container's limit in CPU seconds per second, which may be infinite."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = (
                (root / "cpu" / f"cpu.cfs_{part}_us").read_text().strip()
                for part in ("quota", "period")
            )
        share = float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" or -1: no limit
        return math.inf
    return share if share > 0.0 else math.inf


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def read_cpu_vendor() -> str:
    """Return the CPU vendor. Torch's matrix products depend on it; numpy's do not."""
    return blas.read_cpu_field("vendor_id")
