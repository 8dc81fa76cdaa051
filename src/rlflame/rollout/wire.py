"""The bytes of the values in `spec`: a JSON header and one buffer. Nothing is ever unpickled.

Layout: 6 bytes of magic, the CRC-32 of all that follows it, 8 bytes little-endian header length,
the header, padding to 64, then the arrays, each aligned to 64. The header names the type, its
plain fields, and dtype, shape and offset of each array. Encoding and decoding both refuse NaN
everywhere and infinity in arrays; decoding checks types, dtypes and bounds before a value exists.
A fragment has dozens of small arrays and hundreds of fields, so what can be known of a type is
worked out once. Must not know: sockets, files, processes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import typing
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from . import spec

MAGIC = b"RLFW1\n"
_HEAD = struct.Struct("<6sIQ")
#: What the CRC covers: everything after itself.
_COVERED = 10
_ALIGN = 64
_DTYPES = {name: np.dtype(name) for name in ("<f4", "<f8", "<i8", "|b1", "<i4", "|u1")}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: What JSON writes as it is; a number that may be NaN is not among them.
_PLAIN = frozenset((bool, int, str, type(None)))
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
_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(kind)) for kind in _TYPES.values()}


#: What reading a damaged or hostile header can raise on the way.
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class WireError(ValueError):
    """Bytes that are not what they claim to be."""


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused, in a sentence
def encode(value: Any) -> bytes:
    """One buffer for a spec dataclass, a dict of arrays, or plain JSON values around them."""
    arrays: list[np.ndarray[Any, Any]] = []
    body = _pack(value, arrays)
    offset = 0
    table: list[tuple[str, tuple[int, ...], int]] = []
    for array in arrays:
        offset = -(-offset // _ALIGN) * _ALIGN
        table.append((_DTYPE_NAMES[array.dtype], array.shape, offset))
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


@np.errstate(over="ignore", invalid="ignore")
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


def _array(view: memoryview, start: int, name: str, shape: list[int], offset: int) -> Any:
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise WireError(f"array of unexpected type {name!r}")
    count = 1
    for n in shape:
        if not isinstance(n, int) or n < 0:
            raise WireError(f"array of impossible shape {shape}")
        count *= n
    if offset < 0 or start + offset + count * dtype.itemsize > len(view):
        raise WireError(f"array of shape {shape} reaches past the message")
    flat = np.frombuffer(view, dtype=dtype, count=count, offset=start + offset if count else 0)
    array = flat.reshape(shape)
    _finite(array)
    array.flags.writeable = False
    return array


def _finite(array: np.ndarray[Any, Any]) -> None:
    """Refuse NaN and infinity; of a contiguous array."""
    if array.dtype.kind != "f":
        return
    flat = array.reshape(-1)
    # A sum of squares is finite only where all of them are, and one operation.
    if not math.isfinite(flat.dot(flat)) and not np.isfinite(flat).all():
        raise WireError(f"an array of shape {array.shape} holds NaN or infinity")


def _pack(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.ndarray):
        arrays.append(_ready(value))
        return {"$array": len(arrays) - 1}
    names = _FIELDS.get(kind)
    if names is not None:
        fields = {name: _pack(getattr(value, name), arrays) for name in names}
        return {"$type": kind.__name__, "fields": fields}
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
    raise WireError(f"a {kind.__name__} does not travel")


def _ready(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Contiguous, little-endian, of a type that travels, and finite."""
    if array.dtype not in _DTYPE_NAMES or not array.flags.c_contiguous:
        little = array.dtype.newbyteorder("<")
        array = np.ascontiguousarray(array, dtype=little).reshape(array.shape)
        if array.dtype not in _DTYPE_NAMES:
            raise WireError(f"arrays of type {array.dtype} do not travel")
    _finite(array)
    return array


def _unpack(value: Any, arrays: list[Any]) -> Any:
    if isinstance(value, list):
        return tuple([_unpack(item, arrays) for item in value])
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
    checks = _checks(kind)
    if fields.keys() != checks.keys():
        raise WireError(f"{kind.__name__} with the fields {sorted(fields)}")
    for name, (fits, is_float) in checks.items():
        item = fields[name]
        if not fits(item):
            raise WireError(f"{kind.__name__}.{name} cannot be {type(item).__name__}")
        if is_float:
            fields[name] = float(item)
            if not math.isfinite(fields[name]):
                raise WireError(f"{kind.__name__}.{name} is {item}")
    return kind(**fields)


Check = Callable[[Any], bool]


@cache
def _checks(kind: type) -> dict[str, tuple[Check, bool]]:
    """Of each field, whether a decoded item can stand in it, and whether it is a float."""
    hints = typing.get_type_hints(kind)
    return {name: (_check(hint), hint is float) for name, hint in hints.items()}


def _check(hint: Any) -> Check:
    """Whether an item is what a hint says; array dtypes are checked too."""
    origin = typing.get_origin(hint)
    if origin is np.ndarray:
        return _array_check(typing.get_args(typing.get_args(hint)[1])[0])
    if origin is typing.Literal:
        words = typing.get_args(hint)
        return lambda item: item in words
    if origin is tuple:
        inner = _check(typing.get_args(hint)[0])
        return lambda item: isinstance(item, tuple) and all(map(inner, item))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return lambda item: isinstance(item, dict)
    if origin is not None:
        parts = [_check(part) for part in typing.get_args(hint)]
        return lambda item: any(part(item) for part in parts)
    if hint is float:
        return lambda item: isinstance(item, float | int) and not isinstance(item, bool)
    if hint is int:
        return lambda item: isinstance(item, int) and not isinstance(item, bool)
    if hint is Any:
        return lambda item: True
    return lambda item: isinstance(item, hint)


def _array_check(scalar: Any) -> Check:
    if scalar is Any:
        return lambda item: isinstance(item, np.ndarray)
    dtype = np.dtype(scalar)
    return lambda item: isinstance(item, np.ndarray) and item.dtype == dtype
