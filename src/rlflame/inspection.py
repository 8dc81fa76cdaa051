"""What a checkpoint says of itself, and where two of them differ first. Must not know: display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.checkpoint import Checkpoint, fingerprint_differences, tensors_of
from rlflame.facts import Facts, count, interval
from rlflame.rollout.spec import Array


def summary(path: Path, found: Checkpoint) -> list[tuple[str, str]]:
    """A file in a few lines, as pairs of a word and what there is to say about it."""
    facts = Facts(found.recipe, found.env, "")
    tensors, progress = tensors_of(found), found.progress
    size = sum(tensor.size for tensor in tensors.values())
    kind = "checkpoint" if found.resumable else "policy alone"
    lines = [
        ("file", f"{path}: {kind}, {count(len(tensors), 'tensor')}, {count(size, 'number')}"),
        *facts.lines(),
        (
            "progress",
            f"step {progress.steps:,}, iteration {progress.iteration:,}, "
            f"{count(progress.episodes, 'episode')}",
        ),
    ]
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


def as_dict(path: Path, found: Checkpoint) -> dict[str, Any]:
    """The same for programs, under names that stay."""
    return {
        "file": str(path),
        "kind": "checkpoint" if found.resumable else "policy",
        "recipe": found.recipe.model_dump(mode="json"),
        "progress": asdict(found.progress),
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
    """The first recipe field, counter or tensor in which two files differ; None where equal."""
    if a.digest == b.digest:
        return None
    for found in (
        _fields("recipe", a.recipe.model_dump(), b.recipe.model_dump()),
        _fields("progress", asdict(a.progress), asdict(b.progress)),
        _tensors(tensors_of(a), tensors_of(b)),
    ):
        if found is not None:
            return found
    return f"digest: {a.digest} and {b.digest}"


def machines_differ(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Why bits may differ: what the machines they were made on do not share."""
    return fingerprint_differences(a.fingerprint, b.fingerprint)


def _fields(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    ours, theirs = dict(_leaves(a)), dict(_leaves(b))
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        one, other = ours.get(path, "absent"), theirs.get(path, "absent")
        if one != other:
            return f"{name} {path}: {one!r} and {other!r}"
    return None


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
