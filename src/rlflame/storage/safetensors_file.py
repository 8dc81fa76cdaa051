"""Reads and writes .safetensors files with strings, tensors and a checksum.

Files are written atomically and verified when read. Nothing in them is unpickled or executed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import safetensors.numpy
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rlflame import __version__
from rlflame.config import regular_file
from rlflame.errors import CheckpointError, LearningError, format_shell
from rlflame.rollout.task import Array
from rlflame.storage.available_memory import measure_available_bytes

FORMAT = 1
_BLANK_CHECKSUM = "0" * 64
#: The maximum size of a header: twice that of two evaluations with the most episodes.
_HEADER_LIMIT = 16_000_000
#: More tensors than several networks of sixteen layers and their optimizer states need.
_MAX_TENSORS = 10_000
#: Limits for a header with that many tensors: bytes outside strings, and number of strings.
_SKELETON_LIMIT = 1_000_000
_MAX_STRINGS = 5 * _MAX_TENSORS
#: Bytes per number for each type that numpy supports.
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("U16", "I16", "F16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_TensorName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.]{0,199}$")]
_Size = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
#: The error numbers of a full disk, as opposed to missing permissions.
FULL_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: The suffix of files that are being written. A power failure may leave such files behind.
TEMPORARY_SUFFIX = ".tmp"
#: The temporary names of `write_atomically`, and those of new links to a checkpoint.
_TEMPORARY_NAME = re.compile(
    r"\.(.+\.[0-9a-f]{8}|(latest|step-\d{9,})\.safetensors(\.[\w.-]+)?)"
    + re.escape(TEMPORARY_SUFFIX)
)
EARLIER_HINT = "use an earlier checkpoint of the same run"


def write(path: Path, tensors: dict[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a file atomically.

    Raises LearningError for NaN and infinity, which `read` rejects, before anything is written.
    """
    if (name := _find_not_finite(tensors)) is not None:
        raise LearningError(
            f"{name} contains NaN or infinity; {path} was not written.",
            "start a new run with smaller rewards or a smaller learning rate; to start from the "
            "weights of an earlier file: --init-from FILE",
        )
    file_metadata = {"format": str(FORMAT), "rlflame": __version__, "checksum": _BLANK_CHECKSUM}
    data = _sort_metadata(safetensors.numpy.save(tensors, {**metadata, **file_metadata}))
    checksum = hashlib.sha256(data).hexdigest()
    write_atomically(path, data.replace(_format_seal(_BLANK_CHECKSUM), _format_seal(checksum), 1))


class Layout(BaseModel):
    """The header entry of one tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal[tuple(_ITEM_BYTES)]  # type: ignore[valid-type]
    shape: Annotated[tuple[_Size, ...], Field(max_length=16)]
    data_offsets: tuple[_Size, _Size]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


Layouts = Mapping[str, Layout]
_LAYOUTS = TypeAdapter(Annotated[dict[_TensorName, Layout], Field(max_length=_MAX_TENSORS)])
_METADATA = TypeAdapter(dict[str, str])


def read(
    path: Path,
    mark: str,
    fields: Collection[str],
    check: Callable[[dict[str, str], Layouts], None] | None = None,
) -> tuple[dict[str, str], dict[str, Array]]:
    """Read and verify the strings and tensors of a file.

    `mark` is the field that identifies the type of file, and `fields` are the required fields. The
    header is checked, also by `check` if it is given, before the tensors are read. Raises
    CheckpointError for a file of another type, OSError for an unreadable file, MemoryError for a
    file that is too large, and ValueError with the reason for a damaged file.
    """
    with regular_file.open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = _read_head(path, file, size)
        metadata, layouts = _parse_head(path, head, size, mark)
        if missing := sorted(set(fields) - metadata.keys()):
            raise ValueError(f"its metadata lacks {', '.join(missing)}")
        if check is not None:
            check(metadata, layouts)
        if 2 * size > measure_available_bytes():
            raise MemoryError
        file.seek(0)
        data = file.read(size)
        if len(data) != size or file.read(1) or not data.startswith(head):
            raise ValueError("it changed while it was read")
    _verify(head, data, metadata)
    tensors: dict[str, Array] = safetensors.numpy.load(data)
    if (name := _find_not_finite(tensors)) is not None:
        raise ValueError(f"tensor {name} contains NaN or infinity")
    return metadata, tensors


def _find_not_finite(tensors: Mapping[str, Array]) -> str | None:
    return next(
        (n for n, a in tensors.items() if a.dtype.kind == "f" and not np.isfinite(a).all()), None
    )


def read_metadata(path: Path) -> dict[str, str]:
    """Return a checkpoint's unverified strings, or {} for any other file."""
    absent_errors = FileNotFoundError, IsADirectoryError, regular_file.NotRegularError
    with contextlib.suppress(*absent_errors, ValueError, RecursionError, CheckpointError):
        with regular_file.open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = _read_head(path, file, size)
        return _parse_head(path, head, size, "recipe")[0]
    return {}


@contextlib.contextmanager
def report_read_errors(path: Path) -> Iterator[None]:
    """Turn any error from reading a file into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a crafted header can cause any exception
        hint = "rlflame runs lists the runs here"
        if isinstance(error, FileNotFoundError):
            reason = "does not exist"
        elif isinstance(error, OSError):
            reason = f"cannot be read: {error.strerror or error}"
        elif isinstance(error, MemoryError):
            reason = "does not fit into this machine's memory"
        else:
            reason, hint = f"is {_format_reason(error)}", EARLIER_HINT
        raise CheckpointError(f"{path} {reason}.", hint) from error


def _format_reason(error: Exception) -> str:
    """Describe an error in one line, with the field if its value is invalid."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        name = ascii(".".join(map(str, first["loc"])))[1:-1][:200]
        if error.title == "Recipe" and first["type"] == "extra_forbidden":
            return f"from another version of rlflame: the setting {name} is unknown here"
        return f"damaged: {error.title} {name}: {first['msg']}"[:300]
    return "damaged: " + (str(error).splitlines() or [type(error).__name__])[0][:300]


def write_atomically(path: Path, data: bytes) -> None:
    """Write and sync a temporary file, rename it to `path` and sync the folder."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        remedy = "free disk space" if error.errno in FULL_DISK_ERRNOS else "make it writable"
        hint = f"{remedy}, or choose another folder"
        if not path.parent.exists():
            hint = format_shell("mkdir", "-p", path.parent)
        raise CheckpointError(
            f"{path} could not be written: {error.strerror or error}.", hint
        ) from error
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} was written, but may be lost in a power failure: {error.strerror or error}.",
            "choose another folder",
        ) from error


def is_temporary(name: str) -> bool:
    """Return whether rlflame uses this name for temporary files."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that renames in the folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sort_metadata(data: bytes) -> bytes:
    """Sort the metadata, because safetensors writes it in a random order."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Tensors start at a multiple of eight bytes, as in files that safetensors writes.
    text += b" " * (-len(text) % 8)
    return b"".join((struct.pack("<Q", len(text)), text, data[8 + length :]))


def _format_seal(checksum: str) -> bytes:
    """Format the checksum entry. It is unique, because JSON escapes quotes."""
    return f'"checksum":"{checksum}"'.encode()


def _read_head(path: Path, file: BinaryIO, size: int) -> bytes:
    """Read the header, including the eight bytes of its length."""
    data = file.read(9)
    length = int.from_bytes(data[:8], "little")
    if data[8:] != b"{" or not 2 <= length <= min(_HEADER_LIMIT, size - 8):
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file; pickle and zip files are never opened.",
            "use a .safetensors file of a run, such as its latest.safetensors",
        )
    return data + file.read(length - 1)


def _parse_head(path: Path, head: bytes, size: int, mark: str) -> tuple[dict[str, str], Layouts]:
    """Parse the header and check that its tensors fill the file exactly."""
    _check_skeleton(head)
    header = json.loads(head[8:], object_pairs_hook=_make_distinct_dict)
    metadata = _METADATA.validate_python(header.pop("__metadata__", {}))
    if not {"format", mark} <= metadata.keys():
        raise CheckpointError(
            f"{path} is a safetensors file, but rlflame did not write it.",
            "use a file that rlflame train has written",
        )
    if metadata["format"] != str(FORMAT):
        raise CheckpointError(
            f"{path} has format {metadata['format'][:20]!r}; this rlflame reads {FORMAT}.",
            "install a newer rlflame",
        )
    layouts = _LAYOUTS.validate_python(header)
    end = 0
    for layout in sorted(layouts.values(), key=lambda layout: layout.data_offsets):
        if layout.data_offsets != (end, end + layout.nbytes):
            raise ValueError("its tensors overlap or leave gaps")
        end += layout.nbytes
    if len(head) + end != size:
        raise ValueError(f"its header describes {len(head) + end} bytes, but the file has {size}")
    return metadata, layouts


def _check_skeleton(head: bytes) -> None:
    """Reject a header with too many values, which would take long to parse."""
    plain = head[8:].replace(b"\\\\", b"").replace(b'\\"', b"")
    has_many_strings = plain.count(b'"') > 2 * _MAX_STRINGS
    if has_many_strings or sum(map(len, plain.split(b'"')[::2])) > _SKELETON_LIMIT:
        raise ValueError("its header has too many values")


def _verify(head: bytes, data: bytes, metadata: Mapping[str, str]) -> None:
    """Verify the checksum, which was computed with zeros in its place."""
    checksum = metadata.get("checksum", "")
    digest = hashlib.sha256(head.replace(_format_seal(checksum), _format_seal(_BLANK_CHECKSUM)))
    digest.update(memoryview(data)[len(head) :])
    if digest.hexdigest() != checksum:
        raise ValueError("its checksum does not match its content")


def check_json(text: str, fields: Collection[str] | None = None) -> Any:
    """Parse JSON; reject duplicate or unknown keys and integers over 64 bits."""
    value = json.loads(text, object_pairs_hook=_make_distinct_dict, parse_int=_parse_integer)
    if fields is not None and isinstance(value, dict) and not value.keys() <= set(fields):
        raise ValueError(f"it has an unknown field {min(value.keys() - set(fields))!r:.80}")
    return value


def _parse_integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= 2**63:
        raise ValueError(f"it has the number {text:.40}, which exceeds 64 bits")
    return int(text)


def _make_distinct_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of the pairs in a JSON object; reject duplicate keys."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("it has a duplicate key")
    return values
