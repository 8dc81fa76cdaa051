"""The parts of a replay that change no more, on disk: each in a file of its own, written once.

    RUN/replay/segment-000012-0123456789abcdef.safetensors

The name holds the beginning of the digest, which stands for all that came before: what a run that
went back has collected anew is never taken for what it had collected at first. Must not know: what
a transition is, the loop, when a checkpoint is due.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from rlflame.errors import CheckpointError, ReplayLost
from rlflame.learning.base import Segment, State, digest_of
from rlflame.storage import safetensors_file

_NAME = re.compile(r"segment-\d{6,}-[0-9a-f]{16}\.safetensors")
_FIELDS = ("kind", "segment", "digest")
_ONWARD = "rlflame resume RUN --fresh-replay goes on with an empty replay"


def run_of(checkpoint: Path) -> Path:
    """The run folder that a checkpoint file lies in."""
    parent = checkpoint.absolute().parent
    return parent.parent if parent.name == "checkpoints" else parent


def folder_of(checkpoint: Path) -> Path:
    """Where the segments lie that a checkpoint names."""
    return run_of(checkpoint) / "replay"


def name_of(number: int, digest: str) -> str:
    return f"segment-{number:06d}-{digest[:16]}.safetensors"


def stored(folder: Path, number: int, digest: str) -> Segment:
    """A segment whose content is read, and verified, when it is asked for."""
    return Segment(number, digest, partial(_read, folder / name_of(number, digest), number, digest))


def _read(path: Path, number: int, digest: str) -> State:
    try:
        metadata, arrays = safetensors_file.read(path, "segment", _FIELDS)
        if metadata["segment"] != str(number) or digest_of(arrays) != digest:
            raise ValueError("it is not the segment that the checkpoint names")
    except CheckpointError as error:
        raise ReplayLost(error.message, _ONWARD) from error
    except FileNotFoundError as error:
        raise ReplayLost(f"{path} is missing, and the replay needs it.", _ONWARD) from error
    except OSError as error:
        raise ReplayLost(f"{path} cannot be read: {error.strerror}.", _ONWARD) from error
    except Exception as error:  # whatever a crafted header provokes is one sentence to the user
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise ReplayLost(f"{path} is damaged: {reason}.", _ONWARD) from error
    return arrays


class SegmentFiles:
    """The segments of one run folder. `verified` are known to be there as they should be."""

    def __init__(self, run: Path, verified: Iterable[Segment]) -> None:
        self._folder = run / "replay"
        self._kept = {name_of(segment.number, segment.digest) for segment in verified}

    def keep(self, segments: Iterable[Segment]) -> None:
        """Write those that are not there yet; before the checkpoint that names them."""
        for segment in segments:
            name = name_of(segment.number, segment.digest)
            if name not in self._kept:
                self._write(segment, self._folder / name)
                self._kept.add(name)

    def _write(self, segment: Segment, path: Path) -> None:
        try:
            # A process that died before its checkpoint may have left it, or a disk half of it.
            _read(path, segment.number, segment.digest)
        except CheckpointError:
            if not self._folder.exists():
                self._folder.mkdir()
                safetensors_file.sync_folder(self._folder.parent)
            metadata = {
                "kind": "segment",
                "segment": str(segment.number),
                "digest": segment.digest,
            }
            safetensors_file.write(path, segment.arrays(), metadata)

    def prune(self, needed: Callable[[], Collection[str]]) -> None:
        """Remove what no checkpoint names any more."""
        if self._folder.exists():
            try:
                named = needed()
            except OSError:  # a checkpoint that cannot be read now may need any of them
                return
            for path in self._folder.iterdir():
                if path.name not in named and _NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)
                    self._kept.discard(path.name)
