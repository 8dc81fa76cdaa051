"""Reading and appending to regular files only, within a limit of bytes.

A pipe, a socket or a device in the place of a file would block the process or never end. A refusal
is an OSError, whose `strerror` says why.
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

#: Limits for files that are read whole: settings; records that programs write.
SETTINGS_BYTES = 1_000_000
RECORD_BYTES = 32_000_000
#: Limit for one line of a file that is read line by line.
LINE_BYTES = 1_000_000


class NotRegularError(OSError):
    """There is something in the file's place that is no regular file."""


def open_to_read(path: Path) -> BinaryIO:
    """The regular file, opened; never waits for whoever writes to a pipe."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def open_to_append(path: Path) -> io.TextIOWrapper:
    """The regular file, made where it is absent; a symbolic link is refused.

    Lines end as they are written.
    """
    descriptor = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    return open(descriptor, "a", encoding="utf-8", newline="")


def read_text(path: Path, limit: int) -> str:
    """All of a file of at most `limit` bytes as UTF-8, with every line end as a newline."""
    with open_to_read(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EOVERFLOW, f"it has more than {limit:,} bytes", str(path))
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_lines(
    path: Path, *, newline: str | None = None, encoding: str = "utf-8", limit: int = LINE_BYTES
) -> Iterator[str]:
    """The lines of a file of any size, with their ends; `newline` as `open` takes it."""
    with io.TextIOWrapper(open_to_read(path), encoding, newline=newline) as file:
        lines = iter(lambda: file.readline(limit + 1), "")
        for number, line in enumerate(lines, 1):
            if len(line) > limit:
                reason = f"line {number} has more than {limit:,} characters"
                raise OSError(errno.EOVERFLOW, reason, str(path))
            yield line


def open_unless_link(path: str, flags: int) -> int:
    """An `opener` for `open`: an OSError where the path is a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _open(path: Path, flags: int) -> int:
    # Opening a device may already have an effect. What stood there a moment ago may have been
    # replaced, so the opened file itself is judged too.
    with contextlib.suppress(FileNotFoundError):
        _check_kind(path, os.stat(path))
    # Without O_NONBLOCK opening a pipe would wait for its other end; it changes no regular file.
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
