"""A .safetensors file of ours: JSON strings and plain tensors, under a checksum of every bit.

Written atomically, verified when read, and nothing in it is ever unpickled or executed. Must not
know: what the strings and tensors mean.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from rlflame import __version__
from rlflame.errors import CheckpointError, LearningError, shell
from rlflame.rollout.spec import Array

FORMAT = 1
_BLANK = "0" * 64
_HEADER_LIMIT = 100_000_000
#: There is no room, as against no right to write.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: How the names end of files that are being written, and of those that were when power failed.
TEMPORARY = ".tmp"
#: Of `write_atomically`, and of a name that is about to point to a checkpoint.
_TEMPORARY = re.compile(
    r"\.(.+\.[0-9a-f]{8}|(latest|step-\d{9,})\.safetensors(\.[\w.-]+)?)" + re.escape(TEMPORARY)
)
EARLIER = "use an earlier checkpoint of the same run"


def write(path: Path, tensors: dict[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a file so that at every moment either the old one or the new one is there.

    What `opened` would refuse for its numbers is refused here, while older files are still there.
    """
    if (name := _not_finite(tensors)) is not None:
        raise LearningError(
            f"{name} has come to hold NaN or infinity; {path} was not written.",
            "begin a new run with smaller rewards or a smaller learning rate; --init-from takes "
            "the weights of a file that was written before",
        )
    own = {"format": str(FORMAT), "rlflame": __version__, "checksum": _BLANK}
    data = _ordered(safetensors.numpy.save(tensors, {**metadata, **own}))
    position = _checksum_position(data)
    checksum = _checksum(data, position)
    write_atomically(path, b"".join((data[:position], checksum, data[position + len(checksum) :])))


def opened(
    path: Path, data: bytes, mark: str, fields: Collection[str]
) -> tuple[dict[str, str], dict[str, Array]]:
    """The strings and tensors in a file's bytes, once all of them are verified.

    `mark` is the field by which the kind of file is known, `fields` what it must have. Raises
    ValueError with the reason where the bytes are damaged.
    """
    metadata = _verified_metadata(path, data, mark, fields)
    tensors: dict[str, Array] = safetensors.numpy.load(data)
    if (name := _not_finite(tensors)) is not None:
        raise ValueError(f"tensor {name} holds NaN or infinity")
    return metadata, tensors


def _not_finite(tensors: Mapping[str, Array]) -> str | None:
    return next(
        (n for n, a in tensors.items() if a.dtype.kind == "f" and not np.isfinite(a).all()), None
    )


def strings(path: Path) -> dict[str, str]:
    """A file's strings alone, unverified; none where it is gone, or no file of this kind."""
    gone = FileNotFoundError, IsADirectoryError
    with contextlib.suppress(*gone, ValueError, struct.error, AttributeError, RecursionError):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            text = file.read(min(length, _HEADER_LIMIT))
        found = json.loads(text).get("__metadata__")
        if isinstance(found, dict):
            return {str(name): str(value) for name, value in found.items()}
    return {}


def read(path: Path) -> bytes:
    try:
        if path.is_file():
            return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.", "") from error
    reason = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
    raise CheckpointError(f"{path} {reason}.", "rlflame runs lists the runs here")


def write_atomically(path: Path, data: bytes) -> None:
    """Temporary file in the same folder, flushed to disk, renamed, and the folder flushed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
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
        remedy = "make room" if error.errno in FULL else "see that it can be written"
        hint = f"{remedy}, or choose another folder; what was there before is as it was"
        if not path.parent.exists():
            hint = shell("mkdir", "-p", path.parent)
        raise CheckpointError(
            f"{path} could not be written: {error.strerror or error}.", hint
        ) from error
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} was written, and may be lost if power fails: {error.strerror or error}.",
            "choose another folder",
        ) from error


def is_temporary(name: str) -> bool:
    """Whether a file of this name is one of ours that was not finished."""
    return _TEMPORARY.fullmatch(name) is not None


def sync_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ordered(data: bytes) -> bytes:
    """The same file with its metadata in one order: safetensors has a new one in each process."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Tensors begin at a multiple of eight, as safetensors has them.
    text += b" " * (-len(text) % 8)
    return b"".join((struct.pack("<Q", len(text)), text, data[8 + length :]))


def _checksum_position(data: bytes) -> int:
    """Where the digits of the checksum stand in the header, found once and only once."""
    (length,) = struct.unpack_from("<Q", data)
    header = data[8 : 8 + length]
    key = b'"checksum":"'
    if header.count(key) != 1:
        raise ValueError("it has no single checksum")
    return 8 + header.index(key) + len(key)


def _checksum(data: bytes, position: int) -> bytes:
    """SHA-256 of the file as it is with zeros for its checksum."""
    view = memoryview(data)
    digest = hashlib.sha256(view[:position])
    digest.update(_BLANK.encode())
    digest.update(view[position + len(_BLANK) :])
    return digest.hexdigest().encode()


def _verified_metadata(
    path: Path, data: bytes, mark: str, fields: Collection[str]
) -> dict[str, str]:
    # One of ours has a brace there; its first bytes are a length, and may be any.
    if data[8:9] != b"{" and (data[:2] == b"PK" or data[:1] == b"\x80"):
        raise CheckpointError(
            f"{path} is a pickle or zip file, which rlflame never opens.",
            "rlflame reads only its own .safetensors files",
        )
    if data[8:9] != b"{" and any(data[:8]) and all(byte < 128 for byte in data[:8]):
        raise CheckpointError(
            f"{path} is no safetensors file: it begins {data[:8]!r}.",
            "rlflame reads the .safetensors files of a run, such as its latest.safetensors",
        )
    (length,) = struct.unpack_from("<Q", data) if len(data) >= 8 else (0,)
    if length < 2 or length > min(_HEADER_LIMIT, len(data) - 8) or data[8:9] != b"{":
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file "
            f"(a header of {length} bytes in a file of {len(data)}).",
            EARLIER,
        )
    header = json.loads(data[8 : 8 + length], object_pairs_hook=_distinct)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or "format" not in metadata or mark not in metadata:
        raise CheckpointError(
            f"{path} is a safetensors file, but not one of rlflame's.",
            "rlflame reads the files that rlflame train writes",
        )
    version = str(metadata["format"])
    if not re.fullmatch("[0-9]{1,9}", version) or int(version) > FORMAT:
        raise CheckpointError(
            f"{path} has format {version[:20]!r}; this rlflame reads up to {FORMAT}.",
            "install a newer rlflame",
        )
    position = _checksum_position(data)
    if _checksum(data, position) != data[position : position + len(_BLANK)]:
        raise ValueError("its checksum does not match its content")
    absent = sorted(set(fields) - metadata.keys())
    if absent:
        raise ValueError(f"its metadata lacks {', '.join(absent)}")
    return metadata


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; two readers may disagree about one that names a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header names something twice")
    return found
