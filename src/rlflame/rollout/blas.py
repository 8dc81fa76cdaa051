"""What the linear algebra under numpy is on this machine, and how many threads it may use.

The last bits of a matrix product depend on the kernel that the BLAS picks for the processor, and
can depend on its thread count; so both are part of what a run records. Must not know: policies,
tasks, configuration.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from .blas_env import make_thread_variables

CORE_VARIABLE = "OPENBLAS_CORETYPE"
_PREFIXES = ("scipy_openblas", "openblas")
_SUFFIXES = ("64_", "_64", "")


@cache
def _load_library() -> ctypes.CDLL | None:
    """The OpenBLAS inside numpy's own wheel, or None for a numpy built another way."""
    root = Path(np.__file__).parent
    for folder in (root.parent / "numpy.libs", root / ".dylibs"):
        for path in sorted(folder.glob("*openblas*")) if folder.is_dir() else ():
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                continue
    return None


def _find_symbol(name: str) -> ctypes._NamedFuncPointer | None:
    library = _load_library()
    for prefix in _PREFIXES:
        for suffix in _SUFFIXES:
            try:
                return library[f"{prefix}_{name}{suffix}"] if library else None
            except AttributeError:
                continue
    return None


@cache
def read_core_name() -> str:
    """The processor type the BLAS has tuned itself for, such as `Haswell` or `SkylakeX`."""
    function = _find_symbol("get_corename")
    if function is None:
        return f"{platform.machine()}-unknown-blas"
    function.restype = ctypes.c_char_p
    name = function()
    return name.decode("ascii", "replace") if name else "unknown"


def set_threads(count: int) -> None:
    """Pin the thread count in this process, where numpy may be loaded already."""
    function = _find_symbol("set_num_threads")
    if function is not None:
        function.argtypes = [ctypes.c_int]
        function.restype = None
        function(count)


def can_set_threads() -> bool:
    return _find_symbol("set_num_threads") is not None


@contextmanager
def limit_to_one_thread() -> Iterator[None]:
    """Inside, products are computed as a worker process computes them."""
    function = _find_symbol("get_num_threads")
    if function is None:
        yield
        return
    function.restype = ctypes.c_int
    previous_count = function()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(previous_count)


def make_child_environment(threads: int = 1) -> dict[str, str]:
    """Variables that give a child process the same kernels as this one, on `threads` threads."""
    variables = make_thread_variables(threads)
    if _find_symbol("get_corename") is not None:
        variables[CORE_VARIABLE] = read_core_name()
    return variables


def make_environment_like(core: str, threads: int = 1) -> dict[str, str]:
    """Variables that give a child here the kernels of another machine, where it can run them."""
    variables = make_thread_variables(threads)
    if _find_symbol("get_corename") is not None and can_run(core, _read_processor_flags()):
        variables[CORE_VARIABLE] = core
    return variables


#: What kernels made for a processor type ask of the one they run on.
_REQUIRED_FLAGS = {
    "avx512f": ("skylakex", "cooperlake", "sapphirerapids"),
    "avx2": ("haswell", "zen", "excavator"),
    "avx": ("sandybridge", "bulldozer", "piledriver", "steamroller"),
    "sse3": ("prescott", "core2", "penryn", "dunnington", "nehalem", "atom", "barcelona"),
}


def can_run(core: str, flags: frozenset[str]) -> bool:
    """Whether a processor with these flags can run kernels made for that type."""
    required_flags = [flag for flag, cores in _REQUIRED_FLAGS.items() if core.lower() in cores]
    linux_flags = {"pni" if flag == "sse3" else flag for flag in required_flags}
    return core == read_core_name() or (bool(required_flags) and linux_flags <= flags)


def _read_processor_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":")[1].split())
    except OSError:
        pass
    return frozenset()


def list_simd_extensions() -> list[str]:
    """The vector instruction sets that numpy's own loops use here."""
    try:
        numpy_config = np.show_config(mode="dicts")
    except (TypeError, AttributeError):
        return []
    extensions = (numpy_config or {}).get("SIMD Extensions", {})
    return sorted({*extensions.get("baseline", []), *extensions.get("found", [])})


def read_fingerprint() -> dict[str, str]:
    """What two machines must share for equal recipes to end in equal bits."""
    libc = "-".join(platform.libc_ver()) or platform.version()
    return {
        "core": read_core_name(),
        "simd": " ".join(list_simd_extensions()),
        "system": f"{sys.platform}-{platform.machine()}",
        "libc": libc if libc != "-" else platform.release(),
        "numpy": np.__version__,
    }


def count_usable_cores() -> int:
    """Processors this process may run on; a container's share, not the whole host."""
    return max(1, math.ceil(compute_usable_share()))


def compute_usable_share() -> float:
    """The same in processors' worth of time, which a container may have parts of."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return min(count, _read_quota(Path("/sys/fs/cgroup")))


def _read_quota(root: Path) -> float:
    """Processors' worth of time that a container was granted, infinite if it was not limited."""
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
