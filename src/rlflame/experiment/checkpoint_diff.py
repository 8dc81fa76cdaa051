"""What a checkpoint says of itself, and where two of them differ first. Must not know: display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.config import nested
from rlflame.console.recipe_summary import Facts, interval
from rlflame.errors import CheckpointError
from rlflame.learning.buffers.replay_buffer import segment_rows
from rlflame.rollout.spec import Array
from rlflame.storage import replay_segments, safetensors_file
from rlflame.storage.checkpoint import Checkpoint, fingerprint_differences, tensors_of
from rlflame.text import format_count, format_size
from rlflame.training.trainer import EXPERIENCE


@dataclass(frozen=True, slots=True)
class ReplayFiles:
    """What a checkpoint needs besides itself, and whether it is there. In transitions."""

    transitions: int
    segments: int
    bytes: int
    tail: int
    #: The folder is not beside the file: a copy, which is good for all but resuming.
    absent: bool
    #: What is missing or damaged.
    problem: str | None

    def line(self) -> str:
        tail = f"{self.tail:,} in the file"
        if not self.segments:
            return f"{format_count(self.tail, 'transition')} in the file"
        held = (
            f"{format_count(self.transitions, 'transition')} in "
            f"{format_count(self.segments, 'segment')}"
        )
        if self.absent:
            return f"{held} that are not beside the file, {tail}: resume needs them"
        if self.problem is not None:
            return f"{held}; {self.problem}"
        return f"{held}, {format_size(self.bytes)}; tail of {tail}"


def replay_files(path: Path, found: Checkpoint) -> ReplayFiles | None:
    """The replay of a checkpoint, every file of it read and verified; None where there is none."""
    snapshot = found.snapshot
    if snapshot is None or f"{EXPERIENCE}tail.rewards" not in snapshot.learner:
        return None
    tail = snapshot.learner[f"{EXPERIENCE}tail.rewards"]
    if tail.ndim != 2 or not tail.shape[1]:
        raise CheckpointError(
            f"{path} is damaged: the tail of its replay has the shape {tail.shape}.",
            safetensors_file.EARLIER,
        )
    folder = replay_segments.folder_of(path / "latest" if path.is_dir() else path)
    absent, problem, size = not folder.exists(), None, 0
    for segment in () if absent else snapshot.segments:
        try:
            segment.arrays()
            size += (
                (folder / replay_segments.name_of(segment.number, segment.digest)).stat().st_size
            )
        except CheckpointError as error:
            problem = problem or error.message
    return ReplayFiles(
        transitions=len(snapshot.segments) * segment_rows(tail.shape[1]) * tail.shape[1],
        segments=len(snapshot.segments),
        bytes=size,
        tail=tail.size,
        absent=absent and bool(snapshot.segments),
        problem=problem,
    )


def summary(
    path: Path, found: Checkpoint, replay: ReplayFiles | None = None
) -> list[tuple[str, str]]:
    """A file in a few lines, as pairs of a word and what there is to say about it."""
    facts = Facts(found.recipe, found.env, "")
    tensors, progress = tensors_of(found), found.progress
    size = sum(tensor.size for tensor in tensors.values())
    kind = "checkpoint" if found.resumable else "policy alone"
    lines = [
        (
            "file",
            f"{path}: {kind}, {format_count(len(tensors), 'tensor')}, "
            f"{format_count(size, 'number')}",
        ),
        *facts.lines(),
        (
            "progress",
            f"step {progress.steps:,}, iteration {progress.iteration:,}, "
            f"{format_count(progress.episodes, 'episode')}",
        ),
    ]
    if replay is not None:
        lines.append(("replay", replay.line()))
    if found.evaluation is not None:
        lines.append(("evaluation", interval(found.evaluation)))
    if found.best is not None and found.best != found.evaluation:
        lines.append(("best", interval(found.best)))
    fingerprint = ", ".join(
        f"{name} {value}" for name, value in found.fingerprint.items() if name != "simd"
    )
    lines.append(("made with", fingerprint))
    lines.append(("state digest", found.state_digest))
    lines.append(("digest", found.digest))
    return lines


def outline(path: Path, found: Checkpoint) -> str:
    """A file in one line, for comparisons."""
    kind = "checkpoint" if found.resumable else "policy"
    learning = found.recipe.learning
    return (
        f"{path}: {kind}, {learning.environment.id}, {learning.algorithm}, seed {learning.seed}, "
        f"step {found.progress.steps:,}, digest {found.digest[:16]}"
    )


def as_dict(path: Path, found: Checkpoint, replay: ReplayFiles | None = None) -> dict[str, Any]:
    """The same for programs, under names that stay."""
    return {
        "file": str(path),
        "kind": "checkpoint" if found.resumable else "policy",
        "recipe": found.recipe.model_dump(mode="json"),
        "progress": asdict(found.progress),
        "replay": replay and asdict(replay),
        "evaluation": found.evaluation and found.evaluation.as_dict(),
        "best": found.best and found.best.as_dict(),
        "fingerprint": found.fingerprint,
        "state_digest": found.state_digest,
        "digest": found.digest,
        "tensors": {
            name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
            for name, tensor in tensors_of(found).items()
        },
    }


def first_difference(a: Checkpoint, b: Checkpoint) -> str | None:
    """The first recipe field, counter or tensor in which two files differ; None where equal.

    A digest is also of how a recipe is written, and a version that knows more settings writes more.
    """
    if a.digest == b.digest:
        return None
    for found in (
        _fields("recipe", a.recipe.model_dump(), b.recipe.model_dump()),
        _fields("progress", asdict(a.progress), asdict(b.progress)),
        _tensors(tensors_of(a), tensors_of(b)),
    ):
        if found is not None:
            return found
    return None


def machines_differ(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Why bits may differ: what the machines they were made on do not share."""
    return fingerprint_differences(a.fingerprint, b.fingerprint)


def _fields(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    found = nested.first_difference(a, b)
    return found and f"{name} {found[0]}: {found[1]!r} and {found[2]!r}"


def _tensors(a: Mapping[str, Array], b: Mapping[str, Array]) -> str | None:
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            return f"tensor {name}: only in the {'first' if name in a else 'other'}"
        one, other = a[name], b[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"tensor {name}: {one.dtype}{one.shape} and {other.dtype}{other.shape}"
        # Bytes, because that is what the digest is made of: 0.0 and -0.0 differ.
        ours, theirs = (
            x.reshape(-1).view(np.uint8).reshape(x.size, x.itemsize) for x in (one, other)
        )
        unequal = np.flatnonzero((ours != theirs).any(axis=1))
        if len(unequal):
            place = [int(i) for i in np.unravel_index(unequal[0], one.shape)]
            where = f" at {place}" if place else ""
            return (
                f"tensor {name}{where}: {one[tuple(place)]!s} and {other[tuple(place)]!s} "
                f"({len(unequal):,} of {one.size:,} numbers differ)"
            )
    return None
