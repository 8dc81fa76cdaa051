"""Encodes the types in `task.py` as a JSON header and a buffer, without pickle.

Layout: 6 bytes of magic, the CRC-32 of the rest, 8 bytes of little-endian header length, the
header, padding to a multiple of 64 bytes, then the arrays, each aligned to 64 bytes. The header
contains the type, its plain fields, and the dtype, shape and offset of each array. Encoding and
decoding reject NaN everywhere and infinity in arrays. Decoding checks types, dtypes and bounds
before it creates a value. States and episodes, of which a task or fragment has many, are encoded
column by column, because the names of a thousand small fields would take more space than their
values.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import typing
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import task

Check = Callable[[Any], bool]

MAGIC = b"RLFW1\n"
_HEAD = struct.Struct("<6sIQ")
#: The CRC covers everything that follows it.
_CRC_START = 10
_ALIGN = 64
_DTYPES = {name: np.dtype(name) for name in ("<f4", "<f8", "<i8", "|b1", "<i4", "|u1")}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: Types that JSON writes unchanged; floats are checked for NaN first.
_PLAIN_TYPES = frozenset((bool, int, str, type(None)))
#: Types of decoded JSON values that need no conversion.
_SCALAR_TYPES = _PLAIN_TYPES | {float}
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        task.SpaceLeaf,
        task.WrapperSpec,
        task.EnvSpec,
        task.PolicySpec,
        task.EnvState,
        task.RolloutTask,
        task.EpisodeStat,
        task.Fragment,
        task.RolloutFailure,
    )
}
_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(kind)) for kind in _TYPES.values()}
#: Fields that are encoded as tables: any number of items of one type.
_TABLES = {(task.Fragment, "episodes"), (task.Fragment, "states"), (task.RolloutTask, "states")}


class WireError(ValueError):
    """Raised if a value cannot be encoded, or if bytes are not a valid message."""


# No warnings are needed, because values that are not finite raise WireError.
@np.errstate(over="ignore", invalid="ignore")
def encode(value: Any) -> bytes:
    """Encode dataclasses from `task`, arrays and JSON values, even nested."""
    arrays: list[np.ndarray[Any, Any]] = []
    body = _pack(value, arrays)
    offset = 0
    table: list[tuple[str, tuple[int, ...], int]] = []
    for array in arrays:
        offset = -(-offset // _ALIGN) * _ALIGN
        table.append((_DTYPE_NAMES[array.dtype], array.shape, offset))
        offset += array.nbytes
    header = _WRITER.encode({"value": body, "arrays": table, "size": offset}).encode()
    start = _compute_data_start(len(header))
    buffer = bytearray(start + offset)
    _HEAD.pack_into(buffer, 0, MAGIC, 0, len(header))
    buffer[_HEAD.size : _HEAD.size + len(header)] = header
    view = memoryview(buffer)
    for array, (_, _, position) in zip(arrays, table, strict=True):
        if array.nbytes:
            begin = start + position
            view[begin : begin + array.nbytes] = array.reshape(-1).data.cast("B")
    _HEAD.pack_into(buffer, 0, MAGIC, zlib.crc32(view[_CRC_START:]), len(header))
    return bytes(buffer)


@np.errstate(over="ignore", invalid="ignore")
def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decode a message; raise WireError if it is invalid.

    Decoded arrays are read-only views of `data`.
    """
    try:
        view = memoryview(data).cast("B")
        if len(view) < _HEAD.size or bytes(view[: len(MAGIC)]) != MAGIC:
            raise WireError("not an rlflame message")
        _, checksum, length = _HEAD.unpack_from(view)
        if zlib.crc32(view[_CRC_START:]) != checksum:
            raise WireError("the message is truncated or corrupted")
        if length > len(view) - _HEAD.size:
            raise WireError(f"a header of {length} bytes exceeds the message of {len(view)}")
        header = _READER.decode(str(view[_HEAD.size : _HEAD.size + length], "utf-8"))
        start = _compute_data_start(length)
        size = max(0, len(view) - start)
        if header["size"] != size:
            raise WireError(f"{size} bytes of arrays instead of {header['size']} bytes")
        arrays = [_read_array(view, start, *entry) for entry in header["arrays"]]
        return _unpack(header["value"], arrays)
    except WireError:
        raise
    except Exception as error:  # a damaged or hostile header can cause any exception
        raise WireError(f"damaged message: {error}") from error


def _parse_constant(name: str) -> float:
    """Parse infinity, which is a valid bound of a space, but reject NaN."""
    if name == "NaN":
        raise WireError("a number is NaN")
    return float(name)


_WRITER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False)
_READER = json.JSONDecoder(parse_constant=_parse_constant)


def _compute_data_start(header_length: int) -> int:
    return -(-(_HEAD.size + header_length) // _ALIGN) * _ALIGN


def _read_array(view: memoryview, start: int, name: str, shape: list[int], offset: int) -> Any:
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise WireError(f"an array of unexpected type {name!r}")
    count = 1
    for n in shape:
        if not isinstance(n, int) or n < 0:
            raise WireError(f"an array of invalid shape {shape}")
        count *= n
    if offset < 0 or start + offset + count * dtype.itemsize > len(view):
        raise WireError(f"an array of shape {shape} exceeds the message")
    array: Any = np.ndarray(shape, dtype, view, start + offset if count else 0)
    _check_finite(array)
    array.flags.writeable = False
    return array


def _check_finite(array: np.ndarray[Any, Any]) -> None:
    """Reject NaN and infinity in a contiguous array."""
    if array.dtype.kind != "f":
        return
    flat = array.reshape(-1)
    # The sum of squares is finite only if all values are, and takes one operation.
    if not math.isfinite(flat.dot(flat)) and not np.isfinite(flat).all():
        raise WireError(f"an array of shape {array.shape} contains NaN or infinity")


def _pack(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if isinstance(value, np.ndarray):
        arrays.append(_prepare_array(value))
        return {"$array": len(arrays) - 1}
    names = _FIELDS.get(kind)
    if names is not None:
        fields = {
            name: (_pack_table if (kind, name) in _TABLES else _pack)(getattr(value, name), arrays)
            for name in names
        }
        return {"$type": kind.__name__, "fields": fields}
    if isinstance(value, tuple | list):
        return _pack_items(value, arrays)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        raise WireError("a number is NaN")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise WireError(f"the key {key!r} cannot be encoded")
        # Sorted, so that the order of the items does not change the bytes.
        return {key: _pack(value[key], arrays) for key in sorted(value)}
    raise WireError(f"a value of type {kind.__name__} cannot be encoded")


def _pack_table(items: tuple[Any, ...], arrays: list[np.ndarray[Any, Any]]) -> Any:
    if not items:
        return []
    kind = type(items[0])
    columns = {
        name: _pack_column([getattr(item, name) for item in items], arrays)
        for name in _FIELDS[kind]
    }
    return {"$table": kind.__name__, "columns": columns}


def _pack_column(column: list[Any], arrays: list[np.ndarray[Any, Any]]) -> Any:
    """Encode a column item by item, or arrays of equal shape and dtype as one array."""
    first = column[0]
    if type(first) is np.ndarray and first.ndim:
        dtype, shape = first.dtype, first.shape
        if all(array.shape == shape and array.dtype == dtype for array in column):
            return _pack(np.array(column), arrays)
    return _pack_items(column, arrays)


def _pack_items(items: Sequence[Any], arrays: list[np.ndarray[Any, Any]]) -> list[Any]:
    if _SCALAR_TYPES.issuperset(map(type, items)) and not any(item != item for item in items):
        return list(items)
    return [_pack(item, arrays) for item in items]


def _prepare_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Make an array contiguous and little-endian; reject what cannot be encoded."""
    if array.dtype not in _DTYPE_NAMES or not array.flags.c_contiguous:
        little = array.dtype.newbyteorder("<")
        array = np.ascontiguousarray(array, dtype=little).reshape(array.shape)
        if array.dtype not in _DTYPE_NAMES:
            raise WireError(f"an array of type {array.dtype} cannot be encoded")
    _check_finite(array)
    return array


def _unpack(value: Any, arrays: list[Any]) -> Any:
    if isinstance(value, list):
        if _SCALAR_TYPES.issuperset(map(type, value)):
            return tuple(value)
        return tuple([_unpack(item, arrays) for item in value])
    if not isinstance(value, dict):
        return value
    if "$array" in value:
        index = value["$array"]
        if index not in range(len(arrays)):
            raise WireError(f"no array {index!r} among {len(arrays)}")
        return arrays[index]
    if "$table" in value:
        return _unpack_table(value, arrays)
    if "$type" not in value:
        return {key: _unpack(item, arrays) for key, item in value.items()}
    kind = _find_type(value["$type"])
    fields = {key: _unpack(item, arrays) for key, item in value["fields"].items()}
    columns = _check_columns(kind, {name: [item] for name, item in fields.items()})
    return kind(*[item for (item,) in columns])


def _unpack_table(value: dict[str, Any], arrays: list[Any]) -> Any:
    kind = _find_type(value["$table"])
    columns = {name: list(_unpack(column, arrays)) for name, column in value["columns"].items()}
    return tuple([kind(*fields) for fields in zip(*_check_columns(kind, columns), strict=True)])


def _find_type(name: Any) -> type:
    kind = _TYPES.get(name)
    if kind is None:
        raise WireError(f"unknown type {name!r}")
    return kind


def _check_columns(kind: type, columns: dict[str, list[Any]]) -> list[list[Any]]:
    """Check every item and return the columns in the order of the type's fields."""
    checks = make_field_checks(kind)
    if columns.keys() != checks.keys():
        raise WireError(f"{kind.__name__} does not have exactly the fields {sorted(columns)}")
    field_columns = []
    for name, (fits, exact) in checks.items():
        column = columns[name]
        for item in column:
            if type(item) is not exact and not fits(item):
                raise WireError(f"{kind.__name__}.{name} cannot be {type(item).__name__}")
        if exact is float:
            column = [float(item) for item in column]
            if not all(map(math.isfinite, column)):
                raise WireError(f"{kind.__name__}.{name} is not finite")
        field_columns.append(column)
    return field_columns


@cache
def make_field_checks(kind: type) -> dict[str, tuple[Check, type | None]]:
    """Return, for each field, a check and a type whose values need no check, or None."""
    hints = typing.get_type_hints(kind)
    return {
        name: (_make_check(hint), hint if hint in (bool, int, float, str) else None)
        for name, hint in hints.items()
    }


def _make_check(hint: Any) -> Check:
    """Return a function that checks values and array dtypes against a type hint."""
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if origin in (np.ndarray, NDArray):  # NDArray since numpy 2.5
        scalar = parameters[0] if origin is NDArray else typing.get_args(parameters[1])[0]
        dtype = None if scalar is Any else np.dtype(scalar)
        return lambda item: isinstance(item, np.ndarray) and (dtype is None or item.dtype == dtype)
    if origin is typing.Literal:
        return lambda item: item in parameters
    if origin is tuple:
        inner = _make_check(parameters[0])
        return lambda item: isinstance(item, tuple) and all(map(inner, item))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return lambda item: isinstance(item, dict)
    if origin is not None:
        parts = [_make_check(part) for part in parameters]
        return lambda item: any(part(item) for part in parts)
    if hint is Any:
        return lambda item: True
    kinds = (float, int) if hint is float else hint
    return lambda item: isinstance(item, kinds) and (hint is bool or not isinstance(item, bool))
