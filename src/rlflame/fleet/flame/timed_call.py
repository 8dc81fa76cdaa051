"""Calls flamepy, which sets no deadlines, with timeouts and readable errors."""

from __future__ import annotations

import queue
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from rlflame.errors import FleetError

T = TypeVar("T")
#: The timeout of a call that only waits for the cluster's answer.
CALL_S = 20.0
#: Debugging details that Arrow appends, and an error code that flamepy appends.
_INTERNALS = re.compile(r"\.? gRPC client debug context:| \(code: \d+\)")


class ClusterCallError(FleetError):
    """A call to the cluster timed out or failed."""


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    """Run calls one after another. If a call hangs, this thread is abandoned."""
    while True:
        call, outcomes = calls.get()
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = call(), None
        except BaseException as error:
            outcome = None, error
        _idle_threads.append(calls)
        outcomes.put(outcome)
        del call, outcomes, outcome  # an idle thread must not keep objects alive


#: The queues of idle threads. Starting a thread would cost more than most calls.
_idle_threads: deque[queue.SimpleQueue[Any]] = deque()


def call_with_timeout(call: Callable[[], T], timeout_s: float, operation: str) -> T:
    """Return the call's result; raise FleetError if the call fails or times out."""
    try:
        calls = _idle_threads.pop()
    except IndexError:
        calls = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name="rlflame-call", daemon=True).start()
    outcomes: queue.SimpleQueue[tuple[T, BaseException | None]] = queue.SimpleQueue()
    calls.put((call, outcomes))
    try:
        result, error = outcomes.get(timeout=timeout_s)
    except queue.Empty:
        raise ClusterCallError(
            f"The cluster did not answer within {timeout_s:g} s ({operation})."
        ) from None
    if error is not None:
        raise make_call_error(error, operation)
    return result


def make_call_error(error: BaseException, operation: str) -> FleetError:
    """Convert an error from a call to the cluster into a FleetError."""
    if isinstance(error, FleetError):
        return error
    failure = ClusterCallError(f"The cluster rejected a call ({operation}): {format_error(error)}.")
    failure.__cause__ = error
    return failure


def format_error(error: BaseException) -> str:
    """Format an error from flamepy, gRPC or Arrow as one line."""
    text = _INTERNALS.split(" ".join(str(error).split()))[0]
    return text.rstrip(" .") or type(error).__name__
