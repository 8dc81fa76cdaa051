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


def _make_crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_CRC32C if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC_TABLE = _make_crc_table()


def crc32c(data: bytes) -> int:
    table, crc = _CRC_TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def encode_record(data: bytes) -> bytes:
    """Length, its checksum, the data, its checksum; checksums are masked, as the format has it."""
    length = struct.pack("<Q", len(data))
    return length + _mask_crc(length) + data + _mask_crc(data)


def _mask_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


class EventFile:
    """One file of events, readable after every write."""

    def __init__(self, path: Path, wall_time: float) -> None:
        self._file = open(path, "wb", opener=open_unless_link)  # noqa: SIM115
        self._write(wall_time, _encode_text(3, "brain.Event:2"))
        # Whoever looks on forgets what an earlier file of this folder said of these steps.
        self._write(wall_time, _encode_message(7, _encode_int(1, 1)))

    def write_scalars(self, wall_time: float, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(
            _encode_message(1, _encode_text(1, tag) + _encode_float(2, value))
            for tag, value in values.items()
        )
        self._write(wall_time, _encode_int(2, step) + _encode_message(5, summary))

    def write_session_start(self, wall_time: float, hyperparameters: Mapping[str, Scalar]) -> None:
        entries = b"".join(
            _encode_message(1, _encode_text(1, name) + _encode_message(2, _encode_value(value)))
            for name, value in hyperparameters.items()
        )
        self._write_session_event(
            wall_time, _START, _encode_message(3, entries + _encode_double(5, wall_time))
        )

    def write_session_end(self, wall_time: float) -> None:
        self._write_session_event(
            wall_time,
            _END,
            _encode_message(4, _encode_int(1, _SUCCESS) + _encode_double(2, wall_time)),
        )

    def close(self) -> None:
        self._file.close()

    def _write_session_event(self, wall_time: float, tag: str, content: bytes) -> None:
        plugin = _encode_message(1, _encode_text(1, _HPARAMS) + _encode_message(2, content))
        value = _encode_text(1, tag) + _encode_message(8, _NULL_TENSOR) + _encode_message(9, plugin)
        self._write(wall_time, _encode_message(5, _encode_message(1, value)))

    def _write(self, wall_time: float, event: bytes) -> None:
        self._file.write(encode_record(_encode_double(1, wall_time) + event))
        self._file.flush()


def _encode_value(value: Scalar) -> bytes:
    """A google.protobuf.Value."""
    if isinstance(value, bool):
        return _encode_int(4, value)
    return _encode_text(3, value) if isinstance(value, str) else _encode_double(2, float(value))


def _encode_varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _encode_int(field: int, number: int) -> bytes:
    return _encode_varint(field << 3) + _encode_varint(number)


def _encode_double(field: int, number: float) -> bytes:
    return _encode_varint(field << 3 | 1) + struct.pack("<d", number)


def _encode_message(field: int, data: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(data)) + data


def _encode_text(field: int, text: str) -> bytes:
    return _encode_message(field, text.encode())


def _encode_float(field: int, number: float) -> bytes:
    """Numbers beyond what four bytes hold become infinity."""
    try:
        packed = struct.pack("<f", number)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, number))
    return _encode_varint(field << 3 | 5) + packed
