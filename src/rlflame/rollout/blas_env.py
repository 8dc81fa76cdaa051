"""How a process is told to keep its linear algebra to some threads, before numpy is imported.

Needs nothing, because it comes first. Must not know: what the linear algebra is.
"""

from __future__ import annotations

#: Whichever BLAS numpy was built with, one of these holds it.
THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def make_thread_variables(count: int) -> dict[str, str]:
    return dict.fromkeys(THREAD_VARIABLES, str(count))
