"""Objects of the cluster's cache: bytes written as Arrow arrays, and read without pickle.

flamepy's own `get_object` unpickles a download unless its bytes say that they are an array, so a
client that can write to the cache could run code in every reader. flamepy keeps one connection to
the cache per process, so these are functions. Shipped to workers, where numpy may be missing.
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

from .timed_call import CALL_S, ClusterCallError, call_with_timeout

_TRANSFER_S = 80.0
#: How flamepy marks an Arrow array; every other mark may be a pickle.
_ARRAY_MARK = b"FLM\x03"
#: What reading a damaged or hostile object raises, besides Arrow's own errors.
_DAMAGE = (OSError, LookupError, ValueError, TypeError, EOFError, StopIteration, MemoryError)
#: The last part of a key that a worker may name: the cache makes a UUID.
_OBJECT_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]*")
#: An address of a worker that may be shown: no character that a terminal or shell obeys.
_ADDRESS = re.compile(r"[a-z+]+://[0-9A-Za-z.:_\[\]-]+")


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an object is in the cache.

    `endpoint` is the cache's own address. Executors fetch from it; the driver only shows it.
    """

    endpoint: str
    key: str

    def as_argument(self) -> Any:
        """An argument that the worker's side of flamepy replaces by the object itself."""
        from flamepy.core import ObjectRef

        return ObjectRef(self.endpoint, self.key, 0)


def make_array(content: bytes) -> Any:
    """An Arrow array of the bytes, which flamepy stores without pickling it."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.uint8(), len(content), [None, pa.py_buffer(content)])


def view_array(array: Any) -> memoryview:
    """The bytes of an array that `make_array` made."""
    return memoryview(array.buffers()[1])[array.offset : array.offset + len(array)]


def put(prefix: str, content: bytes) -> Reference:
    return put_value(prefix, make_array(content))


def put_value(prefix: str, value: Any) -> Reference:
    """Store what flamepy itself reads; bytes of ours go through `put`."""
    from flamepy.core import put_object

    reference = call_with_timeout(lambda: put_object(prefix, value), _TRANSFER_S, "put object")
    return Reference(reference.endpoint, reference.key)


def upload(key: str, content: bytes) -> str:
    """Store a package for executors to install; returns its address."""
    from flamepy.core import upload_object

    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as file:
        file.write(content)
        file.flush()
        reference = call_with_timeout(lambda: upload_object(key, file.name), _TRANSFER_S, "upload")
    address = str(reference.endpoint).replace("grpc+tls://", "grpcs://")
    return f"{address}/{key}"


def get(key: str) -> memoryview:
    """The bytes of an object in the configured cache; KeyError if it is not there.

    No other address is called, whatever a reference says.
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
    call_with_timeout(lambda: _delete_without_timeout(prefix), CALL_S, "delete objects")


def _delete_without_timeout(prefix: str) -> None:
    from flamepy.core.cache import delete_objects

    delete_objects(prefix)


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
            f"A worker's answer names the object {key!r}, which is not of session {session.id}.",
            "rlflame cluster-check",
        )
    return Reference(endpoint, key)


def read_object(endpoint: str, key: str) -> memoryview:
    """The bytes of an object. Raises KeyError if the cache at `endpoint` does not have it,
    FleetError if the object is not an array of bytes, and what Arrow Flight raises."""
    import pyarrow as pa
    import pyarrow.flight as flight
    from flamepy.core import cache

    client = cache._get_flight_client(endpoint, cache._get_cache_tls_config())
    table = client.do_get(flight.Ticket(f"{key}:0".encode())).read_all()
    try:
        return _read_array(_read_row(table))
    except (pa.ArrowException, *_DAMAGE) as error:
        raise FleetError(
            f"The object {key} in the cache is not an array of bytes ({error}).",
            "rlflame cluster-check",
        ) from error


def _read_row(table: Any) -> bytes:
    """The base row of a download; patches are not used."""
    import pyarrow as pa

    table.validate(full=True)
    if table.num_rows != 1:
        raise ValueError(f"{table.num_rows} rows")
    (column,) = table.column("data").chunks
    if column.type != pa.binary() or column.null_count:
        raise ValueError(f"a column of {column.type}")
    row: bytes = column[0].as_py()
    return row


def _read_array(row: bytes) -> memoryview:
    import pyarrow as pa

    mark = row[: len(_ARRAY_MARK)]
    if mark != _ARRAY_MARK:
        raise ValueError(f"it is marked {mark!r}")
    # The copy keeps the arrays within aligned.
    batch = pa.ipc.open_stream(pa.BufferReader(row[len(_ARRAY_MARK) :])).read_next_batch()
    batch.validate(full=True)
    array = batch.column(0)
    if array.type != pa.uint8() or array.null_count:
        raise ValueError(f"an array of {array.type}")
    return view_array(array)


class DeferredDeleter:
    """Deletes used objects in a thread, so that no caller waits for it."""

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
                _delete_without_timeout(key)
