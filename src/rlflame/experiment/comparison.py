"""Checkpoints in words, the first difference between two, and checks of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.config import nested
from rlflame.config.toml_io import format_value
from rlflame.console.recipe_summary import RecipeSummary, format_evaluation
from rlflame.errors import CheckpointError, ConfigError, format_command
from rlflame.learning.buffers.replay_buffer import count_segment_rows
from rlflame.rollout.task import Array, EnvSpec
from rlflame.storage import replay_segments, safetensors_file
from rlflame.storage.checkpoint import Checkpoint, collect_tensors
from rlflame.terminal_text import format_count, format_size
from rlflame.training.evaluation import EvaluationPlan, EvaluationRecord
from rlflame.training.trainer import BUFFER_PREFIX


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

    def format_line(self) -> str:
        if not self.segments:
            return f"{format_count(self.tail, 'transition')} in the file"
        text = (
            f"{format_count(self.transitions, 'transition')} in "
            f"{format_count(self.segments, 'segment')}"
        )
        if self.absent:
            return f"{text} that are not beside the file, {self.tail:,} in it: resume needs them"
        if self.problem is not None:
            return f"{text}; {self.problem}"
        return f"{text}, {format_size(self.bytes)}; tail of {self.tail:,} in the file"


def inspect_replay(path: Path, checkpoint: Checkpoint) -> ReplayFiles | None:
    """The replay of a checkpoint, every file of it read and verified; None where there is none."""
    snapshot = checkpoint.snapshot
    if snapshot is None or f"{BUFFER_PREFIX}tail.rewards" not in snapshot.learner:
        return None
    tail = snapshot.learner[f"{BUFFER_PREFIX}tail.rewards"]
    if tail.ndim != 2 or not tail.shape[1]:
        raise CheckpointError(
            f"{path} is damaged: the tail of its replay has the shape {tail.shape}.",
            safetensors_file.EARLIER_HINT,
        )
    folder = replay_segments.find_segment_folder(path / "latest" if path.is_dir() else path)
    absent, problem, size = not folder.exists(), None, 0
    for segment in () if absent else snapshot.segments:
        name = replay_segments.format_segment_name(segment.number, segment.digest)
        try:
            segment.arrays()
            size += (folder / name).stat().st_size
        except CheckpointError as error:
            problem = problem or error.message
    return ReplayFiles(
        transitions=len(snapshot.segments) * count_segment_rows(tail.shape[1]) * tail.shape[1],
        segments=len(snapshot.segments),
        bytes=size,
        tail=tail.size,
        absent=absent and bool(snapshot.segments),
        problem=problem,
    )


def summarise_checkpoint(
    path: Path, checkpoint: Checkpoint, replay: ReplayFiles | None = None
) -> list[tuple[str, str]]:
    """A file in a few lines, as pairs of a word and what there is to say about it."""
    facts = RecipeSummary(checkpoint.recipe, checkpoint.env, "")
    tensors, progress = collect_tensors(checkpoint), checkpoint.progress
    size = sum(tensor.size for tensor in tensors.values())
    kind = "checkpoint" if checkpoint.resumable else "policy alone"
    lines = [
        (
            "file",
            f"{path}: {kind}, {format_count(len(tensors), 'tensor')}, "
            f"{format_count(size, 'number')}",
        ),
        *facts.format_lines(),
        (
            "progress",
            f"step {progress.steps:,}, iteration {progress.iteration:,}, "
            f"{format_count(progress.episodes, 'episode')}",
        ),
    ]
    if replay is not None:
        lines.append(("replay", replay.format_line()))
    if checkpoint.evaluation is not None:
        lines.append(("evaluation", format_evaluation(checkpoint.evaluation)))
    if checkpoint.best is not None and checkpoint.best != checkpoint.evaluation:
        lines.append(("best", format_evaluation(checkpoint.best)))
    fingerprint = ", ".join(
        f"{name} {value}" for name, value in checkpoint.fingerprint.items() if name != "simd"
    )
    lines.append(("made with", fingerprint))
    lines.append(("state digest", checkpoint.state_digest))
    lines.append(("digest", checkpoint.digest))
    return lines


def format_outline(path: Path, checkpoint: Checkpoint) -> str:
    """A file in one line, for comparisons."""
    kind = "checkpoint" if checkpoint.resumable else "policy"
    learning = checkpoint.recipe.learning
    return (
        f"{path}: {kind}, {learning.environment.id}, {learning.algorithm}, seed {learning.seed}, "
        f"step {checkpoint.progress.steps:,}, digest {checkpoint.digest[:16]}"
    )


def as_dict(
    path: Path, checkpoint: Checkpoint, replay: ReplayFiles | None = None
) -> dict[str, Any]:
    """The same for programs, under names that stay."""
    return {
        "file": str(path),
        "kind": "checkpoint" if checkpoint.resumable else "policy",
        "recipe": checkpoint.recipe.model_dump(mode="json"),
        "progress": asdict(checkpoint.progress),
        "replay": replay and asdict(replay),
        "evaluation": checkpoint.evaluation and checkpoint.evaluation.as_dict(),
        "best": checkpoint.best and checkpoint.best.as_dict(),
        "fingerprint": checkpoint.fingerprint,
        "state_digest": checkpoint.state_digest,
        "digest": checkpoint.digest,
        "tensors": {
            name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
            for name, tensor in collect_tensors(checkpoint).items()
        },
    }


def find_first_difference(a: Checkpoint, b: Checkpoint) -> str | None:
    """The first recipe field, counter or tensor in which two files differ; None where equal.

    A digest is also of how a recipe is written, and a version that knows more settings writes more.
    """
    if a.digest == b.digest:
        return None
    for name, fields_a, fields_b in (
        ("recipe", a.recipe.model_dump(), b.recipe.model_dump()),
        ("progress", asdict(a.progress), asdict(b.progress)),
    ):
        difference = nested.find_first_difference(fields_a, fields_b)
        if difference is not None:
            return f"{name} {difference[0]}: {difference[1]!r} and {difference[2]!r}"
    return _compare_tensors(collect_tensors(a), collect_tensors(b))


def _compare_tensors(a: Mapping[str, Array], b: Mapping[str, Array]) -> str | None:
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            return f"tensor {name}: only in the {'first' if name in a else 'other'}"
        tensor_a, tensor_b = a[name], b[name]
        if (tensor_a.dtype, tensor_a.shape) != (tensor_b.dtype, tensor_b.shape):
            return (
                f"tensor {name}: {tensor_a.dtype}{tensor_a.shape} and "
                f"{tensor_b.dtype}{tensor_b.shape}"
            )
        # Bytes, because that is what the digest is made of: 0.0 and -0.0 differ.
        bytes_a, bytes_b = (
            x.reshape(-1).view(np.uint8).reshape(x.size, x.itemsize) for x in (tensor_a, tensor_b)
        )
        unequal = np.flatnonzero((bytes_a != bytes_b).any(axis=1))
        if len(unequal):
            index = [int(i) for i in np.unravel_index(unequal[0], tensor_a.shape)]
            position = f" at {index}" if index else ""
            return (
                f"tensor {name}{position}: {tensor_a[tuple(index)]!s} and "
                f"{tensor_b[tuple(index)]!s} "
                f"({len(unequal):,} of {tensor_a.size:,} numbers differ)"
            )
    return None


@dataclass(frozen=True, slots=True)
class EvaluationCheck:
    """Whether a check passed, in a sentence."""

    check: str
    passed: bool
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_recorded_plan(source: Checkpoint, file: Path) -> EvaluationPlan:
    """The episodes that the file says it was scored on."""
    record = source.evaluation
    if record is None:
        raise CheckpointError(
            f"{file} has no recorded evaluation.", f"score it: {format_command('eval', file)}"
        )
    return EvaluationPlan(record.episodes, record.seed, record.stochastic, record.max_episode_steps)


def check_comparable(a: Checkpoint, b: Checkpoint) -> None:
    """Only policies for the same environment can play the same episodes."""
    if a.env != b.env:
        raise ConfigError(
            "--vs compares policies of one environment, and these are for "
            f"{_format_env(a.env)} and {_format_env(b.env)}.",
            "rlflame inspect shows what a file was trained on",
        )


def _format_env(env: EnvSpec) -> str:
    text = env.id
    if env.kwargs:
        text += f" with {format_value(dict(env.kwargs))}"
    return text + (f" of {env.max_episode_steps:,} steps" if env.max_episode_steps else "")


def check_evaluation(
    source: Checkpoint,
    record: EvaluationRecord,
    min_return: float | None,
    differences: Sequence[str] | None,
) -> list[EvaluationCheck]:
    """The checks that were asked for; `differences` of machines where the record is one of them."""
    checks = []
    if min_return is not None:
        passed = record.mean >= min_return
        text = f"{record.mean:,.1f} {'reaches' if passed else 'is below'} {min_return:,g}."
        checks.append(EvaluationCheck("min_return", passed, f"The mean return {text}"))
    if differences is not None and source.evaluation is not None:
        checks.append(check_against_record(source.evaluation, record, differences))
    return checks


def check_against_record(
    expected: EvaluationRecord, record: EvaluationRecord, differences: Sequence[str]
) -> EvaluationCheck:
    """Equal to the last bit on an equal machine; elsewhere, intervals that overlap."""
    if record.returns == expected.returns and record.lengths == expected.lengths:
        return EvaluationCheck(
            "recorded", True, f"All {record.episodes} returns are the recorded ones, bit for bit."
        )
    pairs = zip(
        zip(record.returns, record.lengths, strict=True),
        zip(expected.returns, expected.lengths, strict=True),
        strict=True,
    )
    episode = next(number for number, (a, b) in enumerate(pairs) if a != b)
    difference = (
        f"episode {episode} returned {record.returns[episode]!r}, "
        f"recorded is {expected.returns[episode]!r}"
    )
    if not differences:
        text = f"Not the recorded returns, on a machine like the recorded one: {difference}."
        return EvaluationCheck("recorded", False, text)
    overlap = record.low <= expected.high and expected.low <= record.high
    verb = "overlaps" if overlap else "lies apart from"
    text = (
        f"This machine differs in {'; '.join(differences)}: {difference}, and the interval "
        f"[{record.low:,.1f}, {record.high:,.1f}] {verb} the recorded "
        f"[{expected.low:,.1f}, {expected.high:,.1f}]."
    )
    return EvaluationCheck("recorded", overlap, text)


def format_comparison(interval: dict[str, float]) -> str:
    if interval["low"] > 0.0:
        return "the first is better"
    return "the other is better" if interval["high"] < 0.0 else "no clear difference"
