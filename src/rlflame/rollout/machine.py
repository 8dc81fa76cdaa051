"""This machine: its host, its processors, and the versions that the bits of a run depend on.

Loads the standard library only, because executors describe themselves before anything is
installed. The functions about bits load numpy.
"""

from __future__ import annotations

import glob
import math
import os
import platform
import socket
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from . import blas

_LIBRARY_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")
_MACHINE_FACTS = ("host", "processor", "memory_bytes", "system", "libc", "python", "packages")
#: Fields of a fingerprint whose difference can change bits; the others are for the reader.
_BIT_FIELDS = ("core", "simd", "system", "libc", "numpy", "gymnasium", "mujoco", "box2d")
#: The same of gradients, compared where both sides have them. Acting needs neither.
_GRADIENT_FIELDS = ("torch", "cpu_vendor", "card")
PACKAGES = ("numpy", "gymnasium", "mujoco", "box2d", "flamepy", "torch")


def describe_host() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: version for name in PACKAGES if (version := _find_version(name))},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "memory_bytes": _read_memory_bytes(),
        "system": f"{sys.platform}-{platform.machine()}",
        "libc": "-".join(platform.libc_ver()),
        "processor": _read_cpu_field("model name"),
        "folder": os.getcwd(),
        "graphics": list_gl_backends(),
    }


def describe_machine() -> dict[str, Any]:
    """The facts that a number measured here should be read with."""
    facts = describe_host()
    return {
        **{name: facts[name] for name in _MACHINE_FACTS},
        "cores": os.cpu_count() or 1,
        "usable_cores": count_usable_cores(),
        "blas": blas.read_core_name(),
    }


def read_fingerprint() -> dict[str, str]:
    """What two machines must share for equal recipes to end in equal bits."""
    import numpy as np

    libc = "-".join(platform.libc_ver()) or platform.version()
    return {
        "core": blas.read_core_name(),
        "simd": " ".join(list_simd_extensions()),
        "system": f"{sys.platform}-{platform.machine()}",
        "libc": libc if libc != "-" else platform.release(),
        "numpy": np.__version__,
    }


def read_versions() -> dict[str, str]:
    """The fingerprint with the versions of Python and of the simulators, for comparisons."""
    packages = {name: _find_version(name) or "absent" for name in ("gymnasium", "mujoco", "box2d")}
    return {"python": platform.python_version(), **read_fingerprint(), **packages}


def find_fingerprint_differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """What differs between two machines that can change bits, as `name: one -> other`."""
    gradient_fields = [name for name in _GRADIENT_FIELDS if name in a and name in b]
    return [
        f"{name}: {a.get(name, '?')} -> {b.get(name, '?')}"
        for name in (*_BIT_FIELDS, *gradient_fields)
        if a.get(name) != b.get(name)
    ]


def count_usable_cores() -> int:
    """Processors this process may run on; a container's share, not the whole host."""
    return max(1, math.ceil(compute_usable_share()))


def compute_usable_share() -> float:
    """Processor seconds per second that this process may use; a container may have a fraction."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return min(count, _read_quota(Path("/sys/fs/cgroup")))


def _read_quota(root: Path) -> float:
    """Processor seconds per second that a container may use; infinite without a limit."""
    try:
        if (root / "cpu.max").exists():
            granted, period = (root / "cpu.max").read_text().split()
        else:
            granted, period = (
                (root / "cpu" / f"cpu.cfs_{part}_us").read_text().strip()
                for part in ("quota", "period")
            )
        share = float(granted) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # no limit is spelt "max", or -1
        return math.inf
    return share if share > 0.0 else math.inf


def list_simd_extensions() -> list[str]:
    """The vector instruction sets that numpy's own loops use here."""
    import numpy as np

    try:
        numpy_config = np.show_config(mode="dicts")
    except (TypeError, AttributeError):
        return []
    extensions = (numpy_config or {}).get("SIMD Extensions", {})
    return sorted({*extensions.get("baseline", []), *extensions.get("found", [])})


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def read_cpu_vendor() -> str:
    """The maker of the CPU. Torch's matrix products depend on it, and numpy's do not."""
    return _read_cpu_field("vendor_id")


def _read_cpu_field(name: str) -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith(name):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def list_gl_backends() -> list[str]:
    """The values of MUJOCO_GL that could work here, by the libraries that there are."""
    if sys.platform == "darwin":
        return ["cgl", "glfw"]
    backends = ["egl"] if _has_library("libEGL") else []
    backends += ["osmesa"] if _has_library("libOSMesa") else []
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return backends + (["glfw"] if display and _has_library("libGL") else [])


def _has_library(name: str) -> bool:
    """Whether a shared library lies where the loader looks."""
    triple = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), f"{sys.prefix}/lib"]
    for folder in _LIBRARY_FOLDERS:
        folders += [folder, f"{folder}/{triple}"]
    return any(glob.glob(f"{glob.escape(folder)}/{name}.so*") for folder in folders if folder)
