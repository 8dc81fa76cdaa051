"""Objects of the cluster's cache: bytes written as Arrow arrays, and read without pickle.

flamepy's own `get_object` unpickles a download unless its bytes say that they are an array, so a
client that can write to the cache could run code in every reader. flamepy keeps one connection to
the cache per process, so these are functions. Shipped to workers.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

from rlflame.errors import FleetError
from rlflame.rollout import wire

from .timed_call import CALL_S, ClusterCallError, call_with_timeout

_TRANSFER_S = 80.0
BEAT_INTERVAL_S, LEASE_CALL_S = 5.0, 4.0
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


def get(key: str, endpoint: str = "", timeout_s: float = _TRANSFER_S) -> memoryview:
    """The bytes of an object; KeyError if it is not there.

    A driver names no `endpoint`: it calls the configured cache alone, whatever a reference says.
    """
    from flamepy.core import cache

    address = endpoint or str(cache._get_cached_context().cache_endpoint)
    try:
        return call_with_timeout(lambda: read_object(address, key), timeout_s, "get object")
    except ClusterCallError as error:
        if isinstance(error.__cause__, KeyError):
            raise KeyError(key) from None
        raise


def delete(prefix: str) -> None:
    from flamepy.core.cache import delete_objects

    call_with_timeout(lambda: delete_objects(prefix), CALL_S, "delete objects")


def parse_reference(output: bytes, session: Any) -> Reference:
    """The object that a worker names as a task's result, which must belong to the session.

    The worker may be hostile: its answer decides neither the address that the driver calls nor
    which other objects the driver reads and deletes.
    """
    from flamepy.core import ObjectRef

    endpoint = key = ""
    with contextlib.suppress(Exception):  # what a hostile answer raises
        reference = ObjectRef.decode(output)
        endpoint, key = str(reference.endpoint), str(reference.key)
    prefix, _, name = key.rpartition("/")
    is_own = prefix == f"{session.application}/{session.id}" and _OBJECT_ID.fullmatch(name)
    if not is_own or not _ADDRESS.fullmatch(endpoint):
        raise FleetError(
            f"A worker's answer names the object {key!r}, which is none of session {session.id}.",
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
        return _parse_download(table)
    except (pa.ArrowException, *_DAMAGE) as error:
        raise FleetError(
            f"The object {key} in the cache is not an array of bytes ({error}).",
            "rlflame cluster-check",
        ) from error


def _parse_download(table: Any) -> memoryview:
    """The array in the base row of a download; patches are not used."""
    import pyarrow as pa

    table.validate(full=True)
    if table.num_rows != 1:
        raise ValueError(f"{table.num_rows} rows")
    (column,) = table.column("data").chunks
    if column.type != pa.binary() or column.null_count:
        raise ValueError(f"a column of {column.type}")
    row: bytes = column[0].as_py()
    if not row.startswith(_ARRAY_MARK):
        raise ValueError(f"it is marked {row[: len(_ARRAY_MARK)]!r}")
    # The copy keeps the arrays within aligned.
    batch = pa.ipc.open_stream(pa.BufferReader(row[len(_ARRAY_MARK) :])).read_next_batch()
    batch.validate(full=True)
    array = batch.column(0)
    if array.type != pa.uint8() or array.null_count:
        raise ValueError(f"an array of {array.type}")
    return view_array(array)


class Lease:
    """An object in the cache that changes every few seconds while a run lives.

    A reader that finds it unchanged twice knows that the run is dead, whatever the clocks of the
    two machines say. Kept by the driver, from construction to `close()`.
    """

    def __init__(self, run: str) -> None:
        #: Where executors read it: they may not reach the address that the driver is given.
        self.reference = {"endpoint": "", "key": make_lease_key(run)}
        self._beat = 0
        self._closing = False
        self._closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._keep_alive, name="rlflame-lease", daemon=True)
        self._thread.start()

    def announce_closing(self) -> None:
        """Tell the workers that their tasks are no longer needed."""
        self._closing = True
        self._write()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=LEASE_CALL_S + 1.0)

    def _write(self) -> None:
        self._beat += 1
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        content = {"beat": self._beat, "closing": self._closing, **owner}
        self.reference["endpoint"] = write_lease(self.reference["key"], content)

    def _keep_alive(self) -> None:
        while not self._closed.wait(BEAT_INTERVAL_S):
            with contextlib.suppress(Exception):  # the next beat may reach the cache
                self._write()


def make_lease_key(run: str) -> str:
    return f"{run}/lease/lease"


def read_lease(key: str, endpoint: str = "") -> dict[str, Any] | None:
    """The content of a lease; None if there is none, FleetError if it cannot be read."""
    try:
        content: dict[str, Any] = wire.decode(get(key, endpoint, 2.0 * LEASE_CALL_S))
        if {"beat", "closing", "host", "pid"} <= content.keys():
            return content
    except KeyError:
        return None
    except (wire.WireError, AttributeError):
        pass
    raise FleetError("It is not of the kind that runs keep.")


def write_lease(key: str, content: dict[str, Any]) -> str:
    """Store the content in the configured cache; returns the address where executors read it."""
    from flamepy.core import ObjectRef, cache, update_object

    endpoint = str(cache._get_cached_context().cache_endpoint)
    reference, value = ObjectRef(endpoint, key, 0), make_array(wire.encode(content))
    reference = call_with_timeout(lambda: update_object(reference, value), LEASE_CALL_S, "lease")
    return str(reference.endpoint)
