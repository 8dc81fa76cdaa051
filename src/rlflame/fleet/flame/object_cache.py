"""Stores and reads bytes in the cluster's object cache, without pickle.

flamepy's `get_object` unpickles a download unless its prefix names another format, so any client
that can write to the cache could run code in every reader. flamepy keeps one connection per
process, so this module defines functions instead of a class. The module is also sent to workers.
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
#: flamepy's prefix for an Arrow array; an object with any other prefix may be a pickle.
_ARRAY_MARK = b"FLM\x03"
#: The errors that a damaged or hostile object can cause, in addition to Arrow's errors.
_DAMAGE = (OSError, LookupError, ValueError, TypeError, EOFError, StopIteration, MemoryError)
#: The last part of the key of a worker's answer, which is a UUID from the cache.
_OBJECT_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]*")
#: An address that is safe to print: no character can make a terminal or a shell run anything.
_ADDRESS = re.compile(r"[a-z+]+://[0-9A-Za-z.:_\[\]-]+")


@dataclass(frozen=True, slots=True)
class Reference:
    """The location of an object in the cache.

    `endpoint` is the address that the cache advertises. Executors download from it; the driver
    never does.
    """

    endpoint: str
    key: str

    def as_argument(self) -> Any:
        """Return an argument that flamepy replaces with the object on the worker."""
        from flamepy.core import ObjectRef

        return ObjectRef(self.endpoint, self.key, 0)


def make_array(content: bytes) -> Any:
    """Return the bytes as an Arrow array, which flamepy stores without pickle."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.uint8(), len(content), [None, pa.py_buffer(content)])


def view_array(array: Any) -> memoryview:
    """Return the bytes of an array from `make_array`, without a copy."""
    return memoryview(array.buffers()[1])[array.offset : array.offset + len(array)]


def put(prefix: str, content: bytes) -> Reference:
    return put_value(prefix, make_array(content))


def put_value(prefix: str, value: Any) -> Reference:
    """Store a value that flamepy itself reads. Use `put` for bytes."""
    from flamepy.core import put_object

    reference = call_with_timeout(lambda: put_object(prefix, value), _TRANSFER_S, "put object")
    return Reference(reference.endpoint, reference.key)


def upload(key: str, content: bytes) -> str:
    """Store a package for executors to install, and return its address."""
    from flamepy.core import upload_object

    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as file:
        file.write(content)
        file.flush()
        reference = call_with_timeout(lambda: upload_object(key, file.name), _TRANSFER_S, "upload")
    address = str(reference.endpoint).replace("grpc+tls://", "grpcs://")
    return f"{address}/{key}"


def get(key: str, endpoint: str = "", timeout_s: float = _TRANSFER_S) -> memoryview:
    """Return the bytes of an object; raise KeyError if the object is missing.

    The driver passes no `endpoint`, so that it calls only the configured cache.
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
    """Parse a reference to a task's result, which must belong to the session.

    A hostile worker must not be able to choose the address that the driver calls, or to make the
    driver read or delete other objects.
    """
    from flamepy.core import ObjectRef

    endpoint = key = ""
    with contextlib.suppress(Exception):  # a hostile answer may raise anything
        reference = ObjectRef.decode(output)
        endpoint, key = str(reference.endpoint), str(reference.key)
    prefix, _, name = key.rpartition("/")
    is_own = prefix == f"{session.application}/{session.id}" and _OBJECT_ID.fullmatch(name)
    if not is_own or not _ADDRESS.fullmatch(endpoint):
        raise FleetError(
            f"A worker's answer names the object {key!r}, which is not from session {session.id}.",
            "rlflame cluster-check",
        )
    return Reference(endpoint, key)


def read_object(endpoint: str, key: str) -> memoryview:
    """Return an object's bytes; raise KeyError if missing, FleetError if invalid."""
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
    """Return the bytes of a download. It must be a single row that holds an array."""
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
    # Slicing copies the row, so the arrays in the copy are aligned.
    batch = pa.ipc.open_stream(pa.BufferReader(row[len(_ARRAY_MARK) :])).read_next_batch()
    batch.validate(full=True)
    array = batch.column(0)
    if array.type != pa.uint8() or array.null_count:
        raise ValueError(f"an array of {array.type}")
    return view_array(array)


class Lease:
    """An object in the cache that the driver renews until `close()`.

    If the object has not changed for some time, readers consider the run dead. The clocks of the
    driver and the readers need not agree.
    """

    def __init__(self, run: str) -> None:
        #: The lease's location for executors, which may be unable to reach the cache at the address
        #: that the driver uses.
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
    """Return a lease, or None if there is none; raise FleetError if it is invalid."""
    try:
        content: dict[str, Any] = wire.decode(get(key, endpoint, 2.0 * LEASE_CALL_S))
        if {"beat", "closing", "host", "pid"} <= content.keys():
            return content
    except KeyError:
        return None
    except (wire.WireError, AttributeError):
        pass
    raise FleetError("The object is not a valid lease.")


def write_lease(key: str, content: dict[str, Any]) -> str:
    """Store a lease in the cache; return the address that executors read it from."""
    from flamepy.core import ObjectRef, cache, update_object

    endpoint = str(cache._get_cached_context().cache_endpoint)
    reference, value = ObjectRef(endpoint, key, 0), make_array(wire.encode(content))
    reference = call_with_timeout(lambda: update_object(reference, value), LEASE_CALL_S, "lease")
    return str(reference.endpoint)
