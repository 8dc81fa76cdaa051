"""The bytes of the values in `spec`: a JSON header and one buffer. Nothing is ever unpickled.

Layout: 6 bytes of magic, the CRC-32 of all that follows it, 8 bytes little-endian header length,
the header, padding to 64, then the arrays, each aligned to 64. The header names the type, its
plain fields, and dtype, shape and offset of each array. Encoding and decoding both refuse NaN
everywhere and infinity in arrays; decoding checks types, dtypes and bounds before a value exists.
Must not know: sockets, files, processes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import typing
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from . import spec

MAGIC = b"RLFW1\n"
_HEAD = struct.Struct("<6sIQ")
#: What the CRC covers: everything after itself.
_COVERED = 10
_ALIGN = 64
_DTYPES = {"<f4", "<f8", "<i8", "|b1", "<i4", "|u1"}
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        spec.EnvSpec,
        spec.PolicySpec,
        spec.EnvState,
        spec.RolloutTask,
        spec.EpisodeStat,
        spec.Fragment,
        spec.RolloutFailure,
    )
}


#: What reading a damaged or hostile header can raise on the way.
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class WireError(ValueError):
    """Bytes that are not what they claim to be."""


def encode(value: Any) -> bytes:
    """One buffer for a spec dataclass, a dict of arrays, or plain JSON values around them."""
    arrays: list[np.ndarray[Any, Any]] = []
    body = _pack(value, arrays)
    offset = 0
    table = []
    for array in arrays:
        offset = -(-offset // _ALIGN) * _ALIGN
        table.append([array.dtype.str, list(array.shape), offset])
        offset += array.nbytes
    header = json.dumps(
        {"value": body, "arrays": table, "size": offset}, sort_keys=True, separators=(",", ":")
    ).encode()
    start = _data_start(len(header))
    buffer = bytearray(start + offset)
    _HEAD.pack_into(buffer, 0, MAGIC, 0, len(header))
    buffer[_HEAD.size : _HEAD.size + len(header)] = header
    view = memoryview(buffer)
    for array, (_, _, position) in zip(arrays, table, strict=True):
        if array.nbytes:
            begin = start + position
            view[begin : begin + array.nbytes] = array.reshape(-1).data.cast("B")
    _HEAD.pack_into(buffer, 0, MAGIC, zlib.crc32(view[_COVERED:]), len(header))
    return bytes(buffer)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value again; arrays are read-only views into `data`. Raises WireError."""
    try:
        return _decode(memoryview(data).cast("B"))
    except WireError:
        raise
    except _DAMAGE as error:
        raise WireError(f"damaged message: {error}") from error


def _decode(view: memoryview) -> Any:
    if len(view) < _HEAD.size or bytes(view[: len(MAGIC)]) != MAGIC:
        raise WireError("not an rlflame message")
    _, checksum, length = _HEAD.unpack_from(view)
    if zlib.crc32(view[_COVERED:]) != checksum:
        raise WireError("the message is cut short or its bits have changed")
    if length > len(view) - _HEAD.size:
        raise WireError(f"header of {length} bytes in a message of {len(view)}")
    text = bytes(view[_HEAD.size : _HEAD.size + length])
    header = json.loads(text, parse_constant=_constant)
    start = _data_start(length)
    if header["size"] != max(0, len(view) - start):
        raise WireError(f"{max(0, len(view) - start)} bytes of arrays, {header['size']} announced")
    arrays = [_array(view, start, *entry) for entry in header["arrays"]]
    return _unpack(header["value"], arrays)


def _constant(name: str) -> float:
    """JSON's extra numbers: an infinite bound of a space is honest, NaN never is."""
    if name == "NaN":
        raise WireError("a number is NaN")
    return float(name)


def _data_start(header_length: int) -> int:
    return -(-(_HEAD.size + header_length) // _ALIGN) * _ALIGN


def _array(view: memoryview, start: int, dtype: str, shape: list[int], offset: int) -> Any:
    if dtype not in _DTYPES:
        raise WireError(f"array of unexpected type {dtype!r}")
    if any(not isinstance(n, int) or n < 0 for n in shape) or offset < 0:
        raise WireError(f"array of impossible shape {shape}")
    count = 1
    for n in shape:
        count *= n
    nbytes = count * np.dtype(dtype).itemsize
    if start + offset + nbytes > len(view):
        raise WireError(f"array of shape {shape} reaches past the end of the message")
    flat = np.frombuffer(view, dtype=dtype, count=count, offset=start + offset if count else 0)
    array = flat.reshape(shape)
    _finite(array)
    array.flags.writeable = False
    return array


def _finite(array: np.ndarray[Any, Any]) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise WireError(f"an array of shape {array.shape} holds NaN or infinity")


def _pack(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<") if value.dtype.byteorder == ">" else value.dtype
        array = np.ascontiguousarray(value, dtype=dtype).reshape(value.shape)
        if array.dtype.str not in _DTYPES:
            raise WireError(f"arrays of type {array.dtype} do not travel")
        _finite(array)
        arrays.append(array)
        return {"$array": len(arrays) - 1}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        raise WireError("a number is NaN")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_pack(item, arrays) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise WireError(f"the key {key!r} does not travel")
        # Sorted, so that equal values have equal bytes whatever order their arrays came in.
        return {key: _pack(value[key], arrays) for key in sorted(value)}
    name = type(value).__name__
    if _TYPES.get(name) is type(value) and dataclasses.is_dataclass(value):
        fields = {f.name: _pack(getattr(value, f.name), arrays) for f in dataclasses.fields(value)}
        return {"$type": name, "fields": fields}
    raise WireError(f"a {type(value).__name__} does not travel")


def _unpack(value: Any, arrays: list[Any]) -> Any:
    if isinstance(value, list):
        return tuple(_unpack(item, arrays) for item in value)
    if not isinstance(value, dict):
        return value
    if "$array" in value:
        index = value["$array"]
        if index not in range(len(arrays)):
            raise WireError(f"array {index!r} of {len(arrays)}")
        return arrays[index]
    if "$type" not in value:
        return {key: _unpack(item, arrays) for key, item in value.items()}
    kind = _TYPES.get(value["$type"])
    if kind is None:
        raise WireError(f"unknown type {value['$type']!r}")
    fields = {key: _unpack(item, arrays) for key, item in value["fields"].items()}
    hints = _hints(kind)
    if fields.keys() != hints.keys():
        raise WireError(f"{kind.__name__} with the fields {sorted(fields)}")
    for name, item in fields.items():
        if not _fits(item, hints[name]):
            raise WireError(f"{kind.__name__}.{name} cannot be {type(item).__name__}")
        if hints[name] is float:
            fields[name] = float(item)
            if not math.isfinite(fields[name]):
                raise WireError(f"{kind.__name__}.{name} is {item}")
    return kind(**fields)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fits(item: Any, hint: Any) -> bool:
    """Whether a decoded item can stand in a field; array dtypes are checked by their hint."""
    origin = typing.get_origin(hint)
    if origin is np.ndarray:
        if not isinstance(item, np.ndarray):
            return False
        scalar = typing.get_args(typing.get_args(hint)[1])[0]
        return scalar is Any or item.dtype == np.dtype(scalar)
    if origin is typing.Literal:
        return item in typing.get_args(hint)
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        return isinstance(item, tuple) and all(_fits(part, inner) for part in item)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(item, dict)
    if origin is not None:
        return any(_fits(item, part) for part in typing.get_args(hint))
    if hint is float:
        return isinstance(item, float | int) and not isinstance(item, bool)
    if hint is int:
        return isinstance(item, int) and not isinstance(item, bool)
    if hint is type(None):
        return item is None
    return hint is Any or isinstance(item, hint)
