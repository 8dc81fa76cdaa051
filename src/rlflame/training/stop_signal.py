"""Handles signals as stop requests, so that a run ends at the next safe moment."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from rlflame.errors import Interruption
from rlflame.training.trainer import StopInterrupt, StopRequest

#: If a second signal has not ended the process after this time, a thread ends the process.
_GRACE_S = 0.5
#: A wait that a signal did not end is interrupted up to `_NUDGES` times, every `_PENDING_MS`.
_PENDING_MS, _NUDGES = 100, 20
#: The signal that interrupts the wait. No other code uses this signal.
_NUDGE = signal.SIGURG


class NullStop:
    """A stop request that is never made."""

    is_requested = False

    @contextlib.contextmanager
    def allow_interrupt(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def abort_on_stop(stop: StopRequest) -> Iterator[None]:
    """Raise KeyboardInterrupt as soon as a stop is requested inside the block."""
    try:
        with stop.allow_interrupt():
            yield
    except StopInterrupt:
        raise KeyboardInterrupt from None


def list_termination_signals() -> list[signal.Signals]:
    """Return SIGTERM and, unless it is ignored (as under nohup), SIGHUP."""
    is_handled = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, *([signal.SIGHUP] if is_handled else [])]


class _SignalHandlers:
    """Installs signal handlers, and a thread that sees every signal immediately.

    Python runs a handler only when the main thread next executes Python code, which may never
    happen. A signal that arrives just before a wait, or in another thread, does not end the wait.
    The thread then interrupts the wait repeatedly, until `is_received` returns True or a time limit
    has passed. These interruptions do not end a wait inside torch or in a hung simulator. If
    `exits` is True, a second signal therefore ends the process.
    """

    def __init__(
        self,
        numbers: Iterable[int],
        handler: Callable[[int, FrameType | None], None],
        is_received: Callable[[], bool],
        *,
        exits: bool = False,
    ) -> None:
        self._is_received, self._exits = is_received, exits
        read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous = {number: signal.signal(number, handler) for number in numbers}
        self._previous[_NUDGE] = signal.signal(_NUDGE, lambda *_: None)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        _handler_stack.append(self)
        threading.Thread(target=self._watch, args=(read_fd,), daemon=True).start()

    def remove(self) -> None:
        if self in _handler_stack:  # not after a fork, which restores the handlers
            _handler_stack.remove(self)
            self.restore()

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._write_fd)

    def _watch(self, read_fd: int) -> None:
        count = nudges = 0
        poll = select.poll()
        poll.register(read_fd, select.POLLIN)
        while True:
            is_pending = nudges and not self._is_received()
            if not poll.poll(_PENDING_MS if is_pending else None):
                nudges -= 1
                signal.pthread_kill(_find_main_thread(), _NUDGE)
                continue
            if not (number := os.read(read_fd, 1)):
                break
            is_stop = number[0] in (signal.SIGINT, signal.SIGTERM)
            is_counted = is_stop or (number[0] == signal.SIGHUP and not count)
            if is_counted:
                count, nudges = count + 1, _NUDGES
            if self._exits and is_stop and count == 2:
                time.sleep(_GRACE_S)
                os._exit(128 + number[0])
        os.close(read_fd)


#: The handlers in use, the innermost last.
_handler_stack: list[_SignalHandlers] = []


def _restore_after_fork() -> None:
    """Remove the handlers in a forked process, because they belong to the parent."""
    for handlers in reversed(_handler_stack):
        handlers.restore()
    _handler_stack.clear()


os.register_at_fork(after_in_child=_restore_after_fork)


def _find_main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident


@contextlib.contextmanager
def exit_on_signal() -> Iterator[None]:
    """Turn termination signals into KeyboardInterrupt, to run clean-up code."""
    signals: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A closing terminal may send SIGHUP twice; the clean-up after the first one must finish.
        if signals:
            return
        # Do not raise an RlflameError, because code that handles such errors might continue.
        signals.append(number)
        raise KeyboardInterrupt

    handlers = _SignalHandlers(list_termination_signals(), interrupt, lambda: bool(signals))
    try:
        yield
    except KeyboardInterrupt:
        if not signals:
            raise
        message = "Terminated; all files and sessions were closed."
        raise Interruption(message, "run the same command again", signals[0]) from None
    finally:
        handlers.remove()


class SignalStop:
    """Requests a stop on the first signal; a second signal ends the process.

    The signals are SIGINT, SIGTERM and SIGHUP. A closing terminal may send SIGHUP twice, the second
    time much later. Therefore, SIGHUP never counts as the second signal. If the first signal is
    SIGHUP, later ones are ignored until the process ends.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._waiting = False
        self._handlers: _SignalHandlers | None = None

    @property
    def is_requested(self) -> bool:
        return self.signal_number is not None

    @contextlib.contextmanager
    def allow_interrupt(self) -> Iterator[None]:
        self._waiting = True
        try:
            if self.is_requested:
                raise StopInterrupt
            yield
        finally:
            self._waiting = False

    def __enter__(self) -> SignalStop:
        numbers = (signal.SIGINT, *list_termination_signals())
        self._handlers = _SignalHandlers(
            numbers, self._handle, lambda: self.is_requested, exits=True
        )
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._handlers is not None
        self._handlers.remove()
        if self.signal_number == signal.SIGHUP:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # A stop request raises KeyboardInterrupt for any of the signals.
        number = self.signal_number
        if isinstance(error, KeyboardInterrupt) and number not in (None, signal.SIGINT):
            raise Interruption(
                "Terminated before the run started.", "run the same command again", number
            ) from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.is_requested and number == signal.SIGHUP:
            return
        if self.is_requested:
            # A second signal takes its default action immediately.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal_number = number
        if self._waiting:
            self._waiting = False
            raise StopInterrupt
