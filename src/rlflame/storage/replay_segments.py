"""The sealed parts of a replay on disk: one file for each, written once.

    RUN/replay/segment-000012-0123456789abcdef.safetensors

The name holds the beginning of the digest, which stands for all that came before: what a run that
went back has collected anew is never taken for what it had collected at first.
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
_HINT = "rlflame resume RUN --fresh-replay goes on with an empty replay"


def find_run_folder(checkpoint: Path) -> Path:
    """The run folder that a checkpoint file lies in."""
    parent = checkpoint.absolute().parent
    return parent.parent if parent.name == "checkpoints" else parent


def find_segment_folder(checkpoint: Path) -> Path:
    """Where the segments lie that a checkpoint names."""
    return find_run_folder(checkpoint) / "replay"


def format_segment_name(number: int, digest: str) -> str:
    return f"segment-{number:06d}-{digest[:16]}.safetensors"


def make_lazy_segment(folder: Path, number: int, digest: str) -> Segment:
    """A segment whose content is read, and verified, when it is asked for."""
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
    """The segments of one run folder. `verified` are known to be there as they should be."""

    def __init__(self, run: Path, verified_segments: Iterable[Segment]) -> None:
        self._folder = run / "replay"
        self._names = {
            format_segment_name(segment.number, segment.digest) for segment in verified_segments
        }

    def write_missing(self, segments: Iterable[Segment]) -> None:
        """Write those that are not there yet; before the checkpoint that names them."""
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
        """Remove what no checkpoint names any more."""
        if self._folder.exists():
            try:
                needed_names = find_needed_names()
            except OSError:  # a checkpoint that cannot be read now may need any of them
                return
            for path in self._folder.iterdir():
                if path.name not in needed_names and _NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)
                    self._names.discard(path.name)
