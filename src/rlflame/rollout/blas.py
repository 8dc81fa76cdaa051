"""Reads and sets the CPU kernels and the number of threads of numpy's BLAS.

The last bits of a matrix product depend on the kernels that the BLAS chooses for the CPU, and may
depend on the number of threads. The functions import numpy and ctypes only when they are called,
because the environment variables for threads must be set before numpy is imported.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

#: Every BLAS that numpy can be built with reads one of these variables when the BLAS is loaded.
THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
CORE_VARIABLE = "OPENBLAS_CORETYPE"
_PREFIXES = ("scipy_openblas", "openblas")
_SUFFIXES = ("64_", "_64", "")


@cache
def _load_library() -> ctypes.CDLL | None:
    """Return the OpenBLAS in numpy's wheel, or None if numpy uses another BLAS."""
    import ctypes

    import numpy as np

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
    for prefix, suffix in itertools.product(_PREFIXES, _SUFFIXES):
        if hasattr(library, symbol := f"{prefix}_{name}{suffix}"):
            return getattr(library, symbol)  # type: ignore[no-any-return]
    return None


@cache
def read_core_name() -> str:
    """Return the CPU type that the BLAS is tuned for, such as `Haswell`."""
    import ctypes

    function = _find_symbol("get_corename")
    if function is None:
        return f"{platform.machine()}-unknown-blas"
    function.restype = ctypes.c_char_p
    return str(function().decode("ascii", "replace"))


def set_threads(count: int) -> None:
    """Set the number of BLAS threads in this process, even after numpy's import."""
    function = _find_symbol("set_num_threads")
    if function is not None:
        function(count)


def can_set_threads() -> bool:
    return _find_symbol("set_num_threads") is not None


@contextmanager
def limit_to_one_thread() -> Iterator[None]:
    """Use one BLAS thread inside the `with` block, as a worker process does."""
    function = _find_symbol("get_num_threads")
    previous_count = function() if function is not None else 1
    set_threads(1)
    try:
        yield
    finally:
        set_threads(previous_count)


def make_thread_variables(count: int) -> dict[str, str]:
    """Return variables that limit BLAS threads if set before numpy is imported."""
    return dict.fromkeys(THREAD_VARIABLES, str(count))


def limit_threads(count: int) -> None:
    """Limit the BLAS threads of this process, which must not have imported numpy."""
    os.environ.update(make_thread_variables(count))


def make_child_environment(threads: int = 1, core: str | None = None) -> dict[str, str]:
    """Return variables that make a child process use the same kernels as this one.

    The child uses `threads` BLAS threads. If this CPU can run the kernels of the CPU type `core`,
    the child uses those kernels instead.
    """
    variables = make_thread_variables(threads)
    if _find_symbol("get_corename") is not None and (core is None or can_run(core)):
        variables[CORE_VARIABLE] = core or read_core_name()
    return variables


#: The CPU flags, as named by Linux, with the CPU types whose kernels need them.
_REQUIRED_FLAGS = {
    "avx512f": ("skylakex", "cooperlake", "sapphirerapids"),
    "avx2": ("haswell", "zen", "excavator"),
    "avx": ("sandybridge", "bulldozer", "piledriver", "steamroller"),
    "pni": ("prescott", "core2", "penryn", "dunnington", "nehalem", "atom", "barcelona"),
}


def can_run(core: str) -> bool:
    """Return whether this CPU can run the kernels of the CPU type `core`."""
    flags = read_cpu_field("flags").split()
    return core == read_core_name() or any(
        core.lower() in cores and flag in flags for flag, cores in _REQUIRED_FLAGS.items()
    )


def read_cpu_field(name: str) -> str:
    """Return a field of Linux's CPU description; on other systems, the CPU type."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith(name):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
