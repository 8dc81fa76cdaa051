"""What lies in a cluster's object cache: put there, fetched, deleted, in bounded time.

flamepy keeps one connection to the cache for a process, and so these are functions. Must not know:
sessions, tasks, what objects are for.
"""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bounded import CALL_S, Unanswered, bounded
from .parcel import context

_TRANSFER_S = 80.0


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an object lies in the cache."""

    endpoint: str
    key: str


def put(prefix: str, content: bytes) -> Reference:
    """Bytes of ours, which travel as an array, so that nothing is pickled."""
    return _put(prefix, np.frombuffer(content, np.uint8))


def put_context(prefix: str, service: type) -> Reference:
    """What executors load, in the form that they expect: it must not need numpy."""
    return _put(prefix, context(service))


def _put(prefix: str, value: Any) -> Reference:
    from flamepy.core import put_object

    found = bounded(lambda: put_object(prefix, value), _TRANSFER_S, "put object")
    return Reference(found.endpoint, found.key)


def upload(key: str, content: bytes) -> str:
    """A package, for executors to install; its address."""
    from flamepy.core import upload_object

    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as file:
        file.write(content)
        file.flush()
        found = bounded(lambda: upload_object(key, file.name), _TRANSFER_S, "upload")
    address = str(found.endpoint).replace("grpc+tls://", "grpcs://")
    return f"{address}/{key}"


def place(output: bytes) -> Reference:
    """Where a task's result lies."""
    from flamepy.core import ObjectRef

    found = ObjectRef.decode(output)
    return Reference(found.endpoint, found.key)


def get(where: Reference) -> Any:
    """An object as it lies in the cache now; KeyError where there is none."""
    from flamepy.core import ObjectRef, get_object

    reference = ObjectRef(where.endpoint, where.key, 0)
    try:
        return bounded(lambda: get_object(reference), _TRANSFER_S, "get object")
    except Unanswered as error:
        if isinstance(error.__cause__, KeyError):
            raise KeyError(where.key) from None
        raise


def delete(prefix: str) -> None:
    bounded(lambda: forget(prefix), CALL_S, "delete objects")


def forget(prefix: str) -> None:
    """The same by a thread that may wait as long as it takes."""
    from flamepy.core.cache import delete_objects

    delete_objects(prefix)


class Litter:
    """Deletes what has been used in a thread of its own: nobody waits for that."""

    def __init__(self) -> None:
        self._keys: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._sweep, name="rlflame-sweep", daemon=True)
        self._thread.start()

    def throw(self, key: str) -> None:
        self._keys.put(key)

    def close(self) -> None:
        self._keys.put(None)
        self._thread.join(timeout=5.0)

    def _sweep(self) -> None:
        while (key := self._keys.get()) is not None:
            with contextlib.suppress(Exception):  # what stays is deleted with the run
                forget(key)
