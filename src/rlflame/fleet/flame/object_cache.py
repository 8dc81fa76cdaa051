"""What lies in a cluster's object cache: put there, fetched, deleted, in bounded time.

flamepy keeps one connection to the cache for a process, and so these are functions. Must not know:
sessions, tasks, what objects are for.
"""

from __future__ import annotations

import contextlib
import queue
import re
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

from rlflame.errors import FleetError

from .raw_object import make_array, read_object
from .requests import make_context
from .timed_call import CALL_S, ClusterCallError, call_with_timeout

_TRANSFER_S = 80.0
#: The last part of a key that a worker may name: the cache makes a UUID.
_OBJECT_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]*")
#: What may be shown of an address that a worker names: nothing that a terminal or shell obeys.
_ADDRESS = re.compile(r"[a-z+]+://[0-9A-Za-z.:_\[\]-]+")


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an object lies in the cache.

    `endpoint` is the cache's own address. Executors fetch from it; the driver only shows it.
    """

    endpoint: str
    key: str


def make_reference_argument(reference: Reference) -> Any:
    """An argument that the worker's side of flamepy replaces by the object itself."""
    from flamepy.core import ObjectRef

    return ObjectRef(reference.endpoint, reference.key, 0)


def put(prefix: str, content: bytes) -> Reference:
    """Bytes of ours, which travel as an array, so that nothing is pickled."""
    return _put(prefix, make_array(content))


def put_context(prefix: str, service: type) -> Reference:
    """What executors load, in the form that they expect: it must not need numpy."""
    return _put(prefix, make_context(service))


def _put(prefix: str, value: Any) -> Reference:
    from flamepy.core import put_object

    reference = call_with_timeout(lambda: put_object(prefix, value), _TRANSFER_S, "put object")
    return Reference(reference.endpoint, reference.key)


def upload(key: str, content: bytes) -> str:
    """A package, for executors to install; its address."""
    from flamepy.core import upload_object

    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as file:
        file.write(content)
        file.flush()
        reference = call_with_timeout(lambda: upload_object(key, file.name), _TRANSFER_S, "upload")
    address = str(reference.endpoint).replace("grpc+tls://", "grpcs://")
    return f"{address}/{key}"


def parse_reference(output: bytes, session: Any) -> Reference:
    """The object that a worker names as a task's result, which must belong to the session.

    The worker may be hostile: its answer decides neither the address that the driver calls nor
    which other objects the driver reads and deletes.
    """
    from flamepy.core import ObjectRef

    try:
        reference = ObjectRef.decode(output)
        endpoint, key = str(reference.endpoint), str(reference.key)
        if not _ADDRESS.fullmatch(endpoint):
            raise ValueError(endpoint)
    except Exception as error:
        raise FleetError(
            f"A worker's answer names no object of the cache ({type(error).__name__}).",
            "rlflame cluster-check",
        ) from error
    prefix, _, name = key.rpartition("/")
    if prefix != f"{session.application}/{session.id}" or not _OBJECT_ID.fullmatch(name):
        raise FleetError(
            f"A worker's answer names the object {key!r}, which is not of the session "
            f"{session.id}.",
            "rlflame cluster-check",
        )
    return Reference(endpoint, key)


def get(key: str) -> memoryview:
    """The bytes of an object as it lies in the configured cache now; KeyError where there is none.

    They are never unpickled, and no other address is called, whatever a reference says.
    """
    from flamepy.core.cache import _get_cached_context

    endpoint = str(_get_cached_context().cache_endpoint)
    try:
        return call_with_timeout(lambda: read_object(endpoint, key), _TRANSFER_S, "get object")
    except ClusterCallError as error:
        if isinstance(error.__cause__, KeyError):
            raise KeyError(key) from None
        raise


def delete(prefix: str) -> None:
    call_with_timeout(lambda: delete_without_timeout(prefix), CALL_S, "delete objects")


def delete_without_timeout(prefix: str) -> None:
    """The same by a thread that may wait as long as it takes."""
    from flamepy.core.cache import delete_objects

    delete_objects(prefix)


class DeferredDeleter:
    """Deletes what has been used in a thread of its own: nobody waits for that."""

    def __init__(self) -> None:
        self._keys: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._delete_queued, name="rlflame-sweep", daemon=True
        )
        self._thread.start()

    def delete(self, key: str) -> None:
        self._keys.put(key)

    def close(self) -> None:
        self._keys.put(None)
        self._thread.join(timeout=5.0)

    def _delete_queued(self) -> None:
        while (key := self._keys.get()) is not None:
            with contextlib.suppress(Exception):  # what stays is deleted with the run
                delete_without_timeout(key)
