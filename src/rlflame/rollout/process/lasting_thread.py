"""A thread that lives as long as its process, for starting processes.

Linux sends the parent-death signal when the thread ends that started the child, not when the
process ends. A worker that was started by a short-lived thread would be killed in the middle of
its work. Must not know: what is started.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Any

    CallQueue = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]

T = TypeVar("T")

_lock = threading.Lock()
_thread: threading.Thread | None = None
_call_queue: CallQueue


def run_in_lasting_thread(call: Callable[[], T]) -> T:
    """The result of a call, made in the main thread or in one that never ends."""
    if threading.current_thread() is threading.main_thread():
        return call()
    from concurrent.futures import Future  # loads logging, which the main thread does without

    future: Future[T] = Future()
    _get_call_queue().put((future, call))
    return future.result()


def _get_call_queue() -> CallQueue:
    global _thread, _call_queue
    with _lock:
        # A forked process has the object, and not the thread.
        if _thread is None or not _thread.is_alive():
            _call_queue = queue.SimpleQueue()
            _thread = threading.Thread(
                target=_run_calls, args=(_call_queue,), name="rlflame-starter", daemon=True
            )
            _thread.start()
        return _call_queue


def _run_calls(calls: CallQueue) -> None:
    while True:
        future, call = calls.get()
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del future, call  # while it waits for the next, it keeps nothing alive
