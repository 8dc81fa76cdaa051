"""Opens only regular files, to read within a size limit or to append.

A pipe, a socket or a device in place of a file could block the process or never end. Such paths are
rejected with an OSError, whose `strerror` gives the reason.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

#: Limits for files that are read whole: settings, and records written by programs.
SETTINGS_BYTES = 1_000_000
RECORD_BYTES = 32_000_000
#: Limit for one line of a file that is read line by line.
LINE_BYTES = 1_000_000


class NotRegularError(OSError):
    """The path is not a regular file."""


def open_to_read(path: Path) -> BinaryIO:
    """Open a regular file for reading; never block on a pipe that has no writer."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def open_to_append(path: Path) -> io.TextIOWrapper:
    """Open a regular file for appending, or create it; reject a symbolic link.

    Line endings are written unchanged.
    """
    descriptor = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    return open(descriptor, "a", encoding="utf-8", newline="")


def read_text(path: Path, limit: int) -> str:
    """Read a UTF-8 file of at most `limit` bytes; convert line endings to newlines."""
    with open_to_read(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EOVERFLOW, f"it has more than {limit:,} bytes", str(path))
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_lines(
    path: Path, *, newline: str | None = None, encoding: str = "utf-8", limit: int = LINE_BYTES
) -> Iterator[str]:
    """Yield the lines of a file, with line endings; `newline` works as in `open`."""
    with io.TextIOWrapper(open_to_read(path), encoding, newline=newline) as file:
        lines = iter(lambda: file.readline(limit + 1), "")
        for number, line in enumerate(lines, 1):
            if len(line) > limit:
                reason = f"line {number} has more than {limit:,} characters"
                raise OSError(errno.EOVERFLOW, reason, str(path))
            yield line


def open_unless_link(path: str, flags: int) -> int:
    """Open a path; raise an OSError if it is a symbolic link.

    This function can be used as the `opener` of `open`.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _open(path: Path, flags: int) -> int:
    # Opening a device can have side effects, so check the path first. The path may be replaced in
    # between, so check the opened file too.
    with contextlib.suppress(FileNotFoundError):
        _check_kind(path, os.stat(path))
    # Without O_NONBLOCK, opening a pipe waits until another process opens its other end. Regular
    # files ignore the flag.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    try:
        _check_kind(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularError(errno.EINVAL, "it is a pipe, a socket or a device", str(path))
