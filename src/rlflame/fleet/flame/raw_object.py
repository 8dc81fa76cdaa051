"""Objects of the cache as plain bytes: written as an Arrow array, read without pickle.

flamepy's own `get_object` unpickles what it downloads unless the bytes say that they are an array,
and so whoever can write to the cache could run code in the reader. Shipped to workers. Must not
know: what the bytes mean, which address is trusted.
"""

from __future__ import annotations

from typing import Any

from rlflame.errors import FleetError

#: How flamepy marks an Arrow array; every other mark may be a pickle.
_ARRAY_MARK = b"FLM\x03"
#: What reading a damaged or hostile object raises, besides Arrow's own errors.
_DAMAGE = (OSError, LookupError, ValueError, TypeError, EOFError, StopIteration, MemoryError)


def make_array(content: bytes) -> Any:
    """An Arrow array of the bytes, which flamepy stores without pickling it."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.uint8(), len(content), [None, pa.py_buffer(content)])


def view_array(array: Any) -> memoryview:
    """The bytes of an array that `make_array` made."""
    return memoryview(array.buffers()[1])[array.offset : array.offset + len(array)]


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
