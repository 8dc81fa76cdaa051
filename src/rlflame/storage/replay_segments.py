"""Reads and writes the segments of a replay buffer, one file per segment:

    RUN/replay/segment-000012-0123456789abcdef.safetensors

The name contains the start of the segment's digest, which also covers all earlier segments.
Therefore, if a run is rewound and collects different data, its new files have different names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from rlflame.errors import CheckpointError, ReplayError
from rlflame.learning.base import Segment, State, compute_digest
from rlflame.storage import safetensors_file

_NAME = re.compile(r"segment-\d{6,}-[0-9a-f]{16}\.safetensors")
_FIELDS = ("kind", "segment", "digest")
_HINT = "continue with an empty replay: rlflame resume RUN --fresh-replay"


def find_run_folder(checkpoint: Path) -> Path:
    """Return the run folder that contains a checkpoint file."""
    parent = checkpoint.absolute().parent
    return parent.parent if parent.name == "checkpoints" else parent


def find_segment_folder(checkpoint: Path) -> Path:
    """Return the folder of the segments that a checkpoint names."""
    return find_run_folder(checkpoint) / "replay"


def format_segment_name(number: int, digest: str) -> str:
    return f"segment-{number:06d}-{digest[:16]}.safetensors"


def make_lazy_segment(folder: Path, number: int, digest: str) -> Segment:
    """Make a segment whose content is read and verified on demand."""
    return Segment(
        number,
        digest,
        partial(_read_segment, folder / format_segment_name(number, digest), number, digest),
    )


def _read_segment(path: Path, number: int, digest: str) -> State:
    try:
        with safetensors_file.report_read_errors(path):
            metadata, arrays = safetensors_file.read(path, "segment", _FIELDS)
            if metadata["segment"] != str(number) or compute_digest(arrays) != digest:
                raise ValueError("it is not the segment that the checkpoint names")
    except CheckpointError as error:
        raise ReplayError(error.message, _HINT) from error
    return arrays


class SegmentFiles:
    """Writes and removes the segment files of a run folder.

    `verified_segments` already have intact files.
    """

    def __init__(self, run: Path, verified_segments: Iterable[Segment]) -> None:
        self._folder = run / "replay"
        self._names = {
            format_segment_name(segment.number, segment.digest) for segment in verified_segments
        }

    def write_missing(self, segments: Iterable[Segment]) -> None:
        """Write the segments that have no file yet."""
        for segment in segments:
            number, digest = segment.number, segment.digest
            name = format_segment_name(number, digest)
            if name not in self._names:
                if not self._folder.exists():
                    self._folder.mkdir()
                    safetensors_file.sync_folder(self._folder.parent)
                metadata = {"kind": "segment", "segment": str(number), "digest": digest}
                safetensors_file.write(self._folder / name, segment.arrays(), metadata)
                self._names.add(name)

    def prune(self, find_needed_names: Callable[[], Collection[str]]) -> None:
        """Remove the segments that no checkpoint needs any longer."""
        if self._folder.exists():
            try:
                needed_names = find_needed_names()
            except OSError:  # an unreadable checkpoint may need any segment
                return
            for path in self._folder.iterdir():
                if path.name not in needed_names and _NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)
                    self._names.discard(path.name)
