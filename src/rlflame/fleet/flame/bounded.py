"""Calls of flamepy, which has no deadlines of its own, in bounded time and in our words.

Must not know: which calls there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from rlflame.errors import FleetError

T = TypeVar("T")


class Unanswered(FleetError):
    """A call to the cluster that did not come back in time, or came back with an error."""


def bounded(call: Callable[[], T], timeout_s: float, what: str) -> T:
    """The call's result, or Unanswered: flamepy has no deadlines of its own."""
    box: list[Any] = []

    def work() -> None:
        try:
            box.append((True, call()))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=work, name=f"rlflame-{what}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not box:
        raise Unanswered(f"The cluster did not answer within {timeout_s:g} s ({what}).")
    good, value = box[0]
    if good:
        result: T = value
        return result
    if isinstance(value, FleetError):
        raise value
    raise Unanswered(f"The cluster refused ({what}): {said(value)}.") from value


def said(error: BaseException) -> str:
    """An error of flamepy, gRPC or Arrow in one line."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
