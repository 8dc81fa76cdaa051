"""The file where the learners of one machine meet.

Other users can reach a port of this machine, but not this file. On Linux it has no name: the
learners inherit it, and it is gone with the last of them.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

#: Descriptors that no other file of this process gets: the lowest free ones are given out first.
_numbers = itertools.cycle(range(512, 960))


class SharedFile(NamedTuple):
    """A path that all learners can open, and what they have to inherit for that."""

    path: str
    descriptors: tuple[int, ...] = ()


def _move_up(descriptor: int) -> int:
    """The same open file under a number that is not given to another file soon.

    torch's FileStore opens its path again when it is destroyed, which may be long after the file
    was closed. Under a number in use it would open, and lock, the file of a later run.
    """
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, next(_numbers))
    except OSError:  # fewer descriptors are allowed
        return descriptor
    os.close(descriptor)
    return moved


@contextmanager
def make_shared_file() -> Iterator[SharedFile]:
    """An empty file that exists until the end of the context."""
    if sys.platform == "linux":
        descriptor = _move_up(os.memfd_create("rlflame-learners"))
        try:
            os.fchmod(descriptor, 0o600)
            yield SharedFile(f"/proc/self/fd/{descriptor}", (descriptor,))
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="rlflame-") as folder:  # for its owner alone
            yield SharedFile(os.path.join(folder, "learners"))
