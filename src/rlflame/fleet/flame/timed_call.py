"""Calls of flamepy, which has no deadlines of its own, in bounded time and in our words.

Must not know: which calls there are.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from rlflame.errors import FleetError

T = TypeVar("T")
#: What a call may take that waits for nothing but the cluster's answer.
CALL_S = 20.0
#: After this Arrow says the same again, at length.
_DEBUG_CONTEXT_MARK = " gRPC client debug context:"


class ClusterCallError(FleetError):
    """A call to the cluster that did not come back in time, or came back with an error."""


class _Caller:
    """A thread that makes one call after another; one that hangs is left to itself."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="rlflame-caller", daemon=True).start()

    def _serve(self) -> None:
        while True:
            call = self.calls.get()
            call.run()
            _idle_callers.append(self)
            call.call_lock.release()
            del call  # and with it what came of it


class _Call:
    """A call, what came of it, and a lock that is free once it is over."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.call_lock = threading.Lock()
        self.call_lock.acquire()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error


#: Callers without a call. To start a thread for each call would cost more than most calls do.
_idle_callers: deque[_Caller] = deque()


def call_with_timeout(call: Callable[[], T], timeout_s: float, operation: str) -> T:
    """The call's result, or ClusterCallError: flamepy has no deadlines of its own."""
    try:
        caller = _idle_callers.pop()
    except IndexError:
        caller = _Caller()
    pending_call = _Call(call)
    caller.calls.put(pending_call)
    if not pending_call.call_lock.acquire(timeout=timeout_s):
        raise ClusterCallError(f"The cluster did not answer within {timeout_s:g} s ({operation}).")
    if pending_call.error is None:
        result: T = pending_call.result
        return result
    raise make_call_error(pending_call.error, operation)


def make_call_error(error: BaseException, operation: str) -> FleetError:
    """What a call came to that did not come to its result, in our words."""
    if isinstance(error, FleetError):
        return error
    failure = ClusterCallError(f"The cluster refused ({operation}): {format_error(error)}.")
    failure.__cause__ = error
    return failure


def format_error(error: BaseException) -> str:
    """An error of flamepy, gRPC or Arrow in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text.partition(_DEBUG_CONTEXT_MARK)[0].rstrip(".")
