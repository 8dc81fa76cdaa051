"""TensorBoard's event files, written by hand: framed records of protocol buffers.

The format has been the same for ten years and needs a hundred lines, where the package that also
writes it brings a web server. Must not know: what the numbers mean.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

from rlflame.config.regular_file import open_unless_link

Scalar = str | bool | int | float

_CRC32C = 0x82F63B78  # Castagnoli's polynomial, reflected
_HPARAMS = "hparams"
_START, _END = "_hparams_/session_start_info", "_hparams_/session_end_info"
#: What the plugin expects beside its data: a tensor of one empty float shape.
_NULL_TENSOR = b"\x08\x01\x12\x02\x12\x00"
_SUCCESS = 1


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_CRC32C if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """Length, its checksum, the data, its checksum; checksums are masked, as the format has it."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


class EventFile:
    """One file of events, readable after every write."""

    def __init__(self, path: Path, wall_time: float) -> None:
        self._file = open(path, "wb", opener=open_unless_link)  # noqa: SIM115
        self._write(wall_time, _text(3, "brain.Event:2"))
        # Whoever looks on forgets what an earlier file of this folder said of these steps.
        self._write(wall_time, _message(7, _whole(1, 1)))

    def scalars(self, wall_time: float, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(
            _message(1, _text(1, tag) + _float(2, value)) for tag, value in values.items()
        )
        self._write(wall_time, _whole(2, step) + _message(5, summary))

    def begin_session(self, wall_time: float, hyperparameters: Mapping[str, Scalar]) -> None:
        entries = b"".join(
            _message(1, _text(1, name) + _message(2, _value(value)))
            for name, value in hyperparameters.items()
        )
        self._session(wall_time, _START, _message(3, entries + _double(5, wall_time)))

    def end_session(self, wall_time: float) -> None:
        self._session(wall_time, _END, _message(4, _whole(1, _SUCCESS) + _double(2, wall_time)))

    def close(self) -> None:
        self._file.close()

    def _session(self, wall_time: float, tag: str, content: bytes) -> None:
        plugin = _message(1, _text(1, _HPARAMS) + _message(2, content))
        value = _text(1, tag) + _message(8, _NULL_TENSOR) + _message(9, plugin)
        self._write(wall_time, _message(5, _message(1, value)))

    def _write(self, wall_time: float, event: bytes) -> None:
        self._file.write(record(_double(1, wall_time) + event))
        self._file.flush()


def _value(value: Scalar) -> bytes:
    """A google.protobuf.Value."""
    if isinstance(value, bool):
        return _whole(4, value)
    return _text(3, value) if isinstance(value, str) else _double(2, float(value))


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _whole(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _double(field: int, number: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", number)


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _float(field: int, number: float) -> bytes:
    """Numbers beyond what four bytes hold become infinity."""
    try:
        packed = struct.pack("<f", number)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, number))
    return _varint(field << 3 | 5) + packed
