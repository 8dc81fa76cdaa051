"""Runs the two halves of a computation, called lanes, in one thread or in two.

The division into lanes does not depend on the number of threads, so the results are bit-identical.
Two threads run in parallel, because numpy releases the interpreter lock inside large operations.
Compiled code has its own second thread, the helper, which waits for work without sleeping for a
short time. Waking a thread of Python takes as long as a small matrix product.
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable

from ..kernels.library import load_kernels

LANES = 2
Work = Callable[[int], None]


def slice_half(size: int, lane: int) -> slice:
    """Return the half of `size` items that a lane processes."""
    middle = size // LANES
    return slice(0, middle) if lane == 0 else slice(middle, size)


class ThreadPair:
    """Runs both lanes of a computation, and waits for them."""

    def __init__(self, threads: int) -> None:
        self._has_threads = threads > 1
        self._second_thread: _SecondThread | None = None
        #: The thread that runs the second lane of compiled code, or None.
        self.helper: int | None = None
        kernels = load_kernels()
        if self._has_threads and kernels is not None:
            self.helper = kernels.start_helper()
            if self.helper:
                weakref.finalize(self, kernels.stop_helper, self.helper)

    def run(self, work: Work) -> None:
        """Run `work(0)` and `work(1)`; raise any exception again."""
        if not self._has_threads:
            for lane in range(LANES):
                work(lane)
            return
        if self._second_thread is None:
            self._second_thread = _SecondThread()
        self._second_thread.start(work)
        try:
            work(0)
        finally:
            error = self._second_thread.wait()
        if error is not None:
            raise error


class _SecondThread:
    """A daemon thread that runs lane 1, for one `work` function at a time."""

    def __init__(self) -> None:
        # Locks are the fastest way to wait. Each thread waits for a lock that the other releases.
        self._start, self._finish = threading.Lock(), threading.Lock()
        self._start.acquire()
        self._finish.acquire()
        self._work: Work | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._loop, name="lane-1", daemon=True).start()

    def start(self, work: Work) -> None:
        # Use the caller's context, which includes numpy's error handling.
        context = contextvars.copy_context()
        self._work = lambda lane: context.run(work, lane)
        self._start.release()

    def wait(self) -> BaseException | None:
        self._finish.acquire()
        error, self._error = self._error, None
        return error

    def _loop(self) -> None:
        while True:
            self._start.acquire()
            try:
                if self._work is not None:
                    self._work(1)
            except BaseException as error:
                self._error = error
            self._work = None
            self._finish.release()
