"""What a machine has installed and what it is, asked of executors and of this machine alike.

Needs the standard library only, because it is asked where nothing may be installed yet. Must not
know: who asks, what is made of the answer.
"""

from __future__ import annotations

import glob
import os
import platform
import socket
import sys
import sysconfig
from importlib import metadata
from typing import Any

_LIBRARY_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")
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
        "processor": _read_processor(),
        "folder": os.getcwd(),
        "graphics": list_gl_backends(),
    }


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


def _read_processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
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
