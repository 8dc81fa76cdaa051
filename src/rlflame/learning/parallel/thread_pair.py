"""Runs the two halves of a computation, called lanes, in one thread or in two.

The division into lanes does not depend on the number of threads, so the results are bit-identical.
Two threads run in parallel, because numpy releases the interpreter lock inside large operations.
Compiled code has its own second thread, the helper: after each call, it waits without sleeping for
about half a millisecond, because waking a thread takes as long as a small matrix product.
"""

from __future__ import annotations

import contextvars
import os
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
        self._helper: int | None = None
        self._finalisers: list[weakref.finalize[..., ThreadPair]] = []
        _PAIRS.add(self)

    @property
    def helper(self) -> int | None:
        """The thread that runs the second lane of compiled code, or None."""
        if self._helper is None and self._has_threads:
            kernels = load_kernels()
            if kernels is not None:
                self._helper = kernels.start_helper()
                if self._helper:
                    self._stop_later(kernels.stop_helper, self._helper)
        return self._helper

    def run(self, work: Work) -> None:
        """Run `work(0)` and `work(1)`; raise any exception again."""
        if not self._has_threads:
            for lane in range(LANES):
                work(lane)
            return
        second_thread, self._second_thread = self._second_thread, None
        if second_thread is None:
            second_thread = _SecondThread()
            self._stop_later(second_thread.stop)
        second_thread.start(work)
        try:
            work(0)
        finally:
            error = second_thread.wait()
            # If a signal handler raises an exception before, a new thread replaces this one.
            self._second_thread = second_thread
        if error is not None:
            raise error

    def forget_threads(self) -> None:
        """Forget the threads; a forked process does not have them."""
        for finaliser in self._finalisers:
            finaliser.detach()
        self._finalisers.clear()
        self._helper = self._second_thread = None

    def _stop_later(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function when this object is deleted, but not at the end of the process."""
        finaliser = weakref.finalize(self, function, *arguments)
        # Another thread could still be using the object then.
        finaliser.atexit = False
        self._finalisers.append(finaliser)


_PAIRS: weakref.WeakSet[ThreadPair] = weakref.WeakSet()


def _forget_threads() -> None:
    for pair in list(_PAIRS):
        pair.forget_threads()


os.register_at_fork(after_in_child=_forget_threads)


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

    def stop(self) -> None:
        """End the thread; it must be waiting for work."""
        self._start.release()

    def _loop(self) -> None:
        while True:
            self._start.acquire()
            work, self._work = self._work, None
            if work is None:
                return
            try:
                work(1)
            except BaseException as error:
                self._error = error
            # The work must not stay alive until the next one.
            del work
            self._finish.release()
