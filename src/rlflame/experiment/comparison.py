"""Describes and compares checkpoints, and checks evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.config import nested_dict
from rlflame.config.toml_io import format_value
from rlflame.console.recipe_summary import RecipeSummary, format_evaluation
from rlflame.errors import CheckpointError, ConfigError, format_command
from rlflame.experiment.resume import find_machine_differences
from rlflame.learning.buffers.replay_buffer import count_segment_rows
from rlflame.rollout.task import Array
from rlflame.storage import replay_segments, run_folder, safetensors_file
from rlflame.storage.checkpoint import Checkpoint, collect_tensors
from rlflame.terminal_text import format_count, format_return, format_size
from rlflame.training.evaluation import EvaluationPlan, EvaluationRecord, compute_paired_difference
from rlflame.training.trainer import BUFFER_PREFIX


@dataclass(frozen=True, slots=True)
class ReplayFiles:
    """The replay segment files that a checkpoint needs.

    `tail` is the number of transitions that are not in a segment yet.
    """

    transitions: int
    segments: int
    bytes: int
    tail: int
    #: Whether the replay folder is missing, for example because the checkpoint was copied without
    #: it. Such a checkpoint can be resumed only with an empty replay buffer.
    absent: bool
    #: The error message for the first missing or damaged file. None if all files are intact, or if
    #: the replay folder is missing.
    problem: str | None

    def format_line(self) -> str:
        place = " that are not next to the file" if self.absent else f", {format_size(self.bytes)}"
        return (
            f"{format_count(self.transitions, 'transition')} in "
            f"{format_count(self.segments, 'segment')}{place}; the last {self.tail:,} in the file"
        )


@dataclass(frozen=True, slots=True)
class FileContent:
    """A checkpoint, the path it was read from, and its replay files."""

    path: Path
    checkpoint: Checkpoint
    replay: ReplayFiles | None

    @property
    def kind(self) -> str:
        return "checkpoint" if self.checkpoint.resumable else "policy"

    def format_lines(self) -> list[tuple[str, str]]:
        """Return the lines to print, as (label, text) pairs."""
        checkpoint, progress = self.checkpoint, self.checkpoint.progress
        tensors = collect_tensors(checkpoint)
        size = format_count(sum(tensor.size for tensor in tensors.values()), "number")
        position = f"step {progress.steps:,}, iteration {progress.iteration:,}"
        fingerprint = checkpoint.fingerprint.items()
        evaluation, best = checkpoint.evaluation, checkpoint.best
        differences = find_machine_differences(checkpoint)
        return [
            ("file", f"{self.path}: {self.kind}, {format_count(len(tensors), 'tensor')}, {size}"),
            *RecipeSummary(checkpoint.recipe, checkpoint.env, "").format_lines(),
            ("progress", f"{position}, {format_count(progress.episodes, 'episode')}"),
            *([("replay", self.replay.format_line())] if self.replay else []),
            *([("evaluation", format_evaluation(evaluation))] if evaluation else []),
            *([("best", format_evaluation(best))] if best and best != evaluation else []),
            ("made with", ", ".join(f"{name} {x}" for name, x in fingerprint if name != "simd")),
            *([("differs here", "; ".join(differences))] if differences else []),
            ("state digest", checkpoint.state_digest),
            ("digest", checkpoint.digest),
        ]

    def format_outline(self) -> str:
        """Summarise the file in one line."""
        learning = self.checkpoint.recipe.learning
        return (
            f"{self.path}: {self.kind}, {learning.environment.id}, {learning.algorithm}, "
            f"seed {learning.seed}, step {self.checkpoint.progress.steps:,}, "
            f"digest {self.checkpoint.digest[:16]}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON output. Its keys stay the same in later versions."""
        checkpoint = self.checkpoint
        return {
            "file": str(self.path),
            "kind": self.kind,
            "recipe": checkpoint.recipe.model_dump(mode="json"),
            "progress": checkpoint.progress,
            "replay": self.replay,
            "evaluation": checkpoint.evaluation and checkpoint.evaluation.as_dict(),
            "best": checkpoint.best and checkpoint.best.as_dict(),
            "fingerprint": checkpoint.fingerprint,
            "machine_differences": find_machine_differences(checkpoint),
            "state_digest": checkpoint.state_digest,
            "digest": checkpoint.digest,
            "tensors": {
                name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
                for name, tensor in collect_tensors(checkpoint).items()
            },
        }


def read_content(path: Path, note: Callable[[str], None], *, with_replay: bool) -> FileContent:
    """Read a checkpoint file, or the latest checkpoint of a run folder.

    If `with_replay` is True, also verify its replay files.
    """
    checkpoint, replay, last_digest = run_folder.load_newest_checkpoint(path, note), None, None
    while with_replay and checkpoint.digest != last_digest:
        replay, last_digest = inspect_replay(path, checkpoint), checkpoint.digest
        if replay is None or replay.problem is None:
            break
        # A running trainer may have saved a new checkpoint and removed old segments.
        checkpoint = run_folder.load_newest_checkpoint(path, note)
    return FileContent(path, checkpoint, replay)


def inspect_replay(path: Path, checkpoint: Checkpoint) -> ReplayFiles | None:
    """Verify a checkpoint's replay files; return None without a replay buffer."""
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


def find_first_difference(a: Checkpoint, b: Checkpoint) -> str | None:
    """Describe the first recipe field, counter or tensor that differs, if any.

    If only one of them is a policy, only the weights of the policies are compared. Equal
    checkpoints can have different digests, because a digest also covers the text of the recipe, to
    which newer versions of rlflame add settings.
    """
    if a.digest == b.digest:
        return None
    for name, fields_a, fields_b in (
        ("recipe", a.recipe.model_dump(), b.recipe.model_dump()),
        ("progress", asdict(a.progress), asdict(b.progress)),
    ):
        difference = nested_dict.find_first_difference(fields_a, fields_b)
        if difference is not None:
            return f"{name} {difference[0]}: {difference[1]!r} and {difference[2]!r}"
    prefix = "policy." if a.resumable != b.resumable else ""
    return _compare_tensors(*(_select_tensors(source, prefix) for source in (a, b)))


def _select_tensors(source: Checkpoint, prefix: str) -> dict[str, Array]:
    tensors = collect_tensors(source).items()
    return {name: tensor for name, tensor in tensors if name.startswith(prefix)}


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
        # Compare bytes, as the digest does: 0.0 and -0.0 differ.
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
    """The result of a check, and a sentence that explains the result."""

    check: str
    passed: bool
    text: str


def make_recorded_plan(source: Checkpoint, file: Path) -> EvaluationPlan:
    """Return the plan of the evaluation that the checkpoint records."""
    record = source.evaluation
    if record is None:
        raise CheckpointError(
            f"{file} has no recorded evaluation.", f"evaluate it: {format_command('eval', file)}"
        )
    return EvaluationPlan(record.episodes, record.seed, record.stochastic, record.max_episode_steps)


def has_other_returns(
    record: EvaluationRecord | None, seed: int, returns: Mapping[int, float]
) -> bool:
    """Return whether deterministic episodes have other returns than in the record.

    `returns` maps the numbers of episodes to their returns. Episodes that the record does not
    contain are not compared.
    """
    if record is None or record.stochastic or record.seed != seed:
        return False
    return any(
        number < record.episodes and record.returns[number] != value
        for number, value in returns.items()
    )


def check_comparable(a: Checkpoint, b: Checkpoint) -> None:
    """Raise ConfigError unless both policies were trained in the same environment."""
    difference = nested_dict.find_first_difference(
        *(asdict(replace(source.env, episodes="auto")) for source in (a, b))
    )
    if difference is not None:
        name, *values = difference
        raise ConfigError(
            "--vs compares policies of one environment, but for these policies "
            f"environment.{name} is {' and '.join(map(format_value, values))}.",
            "rlflame inspect shows the environment of a file",
        )


def check_evaluation(
    source: Checkpoint,
    record: EvaluationRecord,
    min_return: float | None,
    differences: Sequence[str] | None,
) -> list[EvaluationCheck]:
    """Check an evaluation against `min_return` and against the recorded one.

    `differences` lists how this machine differs from the one that made the checkpoint. If it is
    None, the second check is skipped. If `min_return` is None, the first check is skipped.
    """
    checks = []
    if min_return is not None:
        passed = record.mean >= min_return
        text = f"{'reaches' if passed else 'is below'} {min_return:,g}."
        checks.append(
            EvaluationCheck(
                "min_return", passed, f"The mean return {format_return(record.mean)} {text}"
            )
        )
    if differences is not None and source.evaluation is not None:
        checks.append(_check_against_record(source.evaluation, record, differences))
    return checks


def check_difference(
    record: EvaluationRecord, other: EvaluationRecord, better_than: float
) -> EvaluationCheck:
    """Require that the interval of the paired difference lies above `better_than`."""
    difference = compute_paired_difference(record, other)
    passed = difference["low"] > better_than
    interval = (
        f"[{format_return(difference['low'], '+')}, {format_return(difference['high'], '+')}]"
    )
    text = (
        f"The 95% interval {interval} of the difference is {'' if passed else 'not '}"
        f"above {better_than:g}."
    )
    return EvaluationCheck("better_than", passed, text)


def _check_against_record(
    expected: EvaluationRecord, record: EvaluationRecord, differences: Sequence[str]
) -> EvaluationCheck:
    """Require the same returns and lengths as in the recorded evaluation.

    On a different machine, it is enough that the confidence intervals of the mean overlap.
    """
    if record.returns == expected.returns and record.lengths == expected.lengths:
        return EvaluationCheck(
            "recorded", True, f"All {record.episodes} returns are bit-identical to the record."
        )
    unequal = np.not_equal([record.returns, record.lengths], [expected.returns, expected.lengths])
    episode = int(unequal.any(axis=0).argmax())
    overlap = record.low <= expected.high and expected.low <= record.high
    text = (
        f"Episode {episode} returned {record.returns[episode]!r}, but the record has "
        f"{expected.returns[episode]!r}; the interval "
        f"{'overlaps' if overlap else 'does not overlap'} the recorded one. Machine "
        f"differences: {'; '.join(differences) or 'none'}."
    )
    return EvaluationCheck("recorded", bool(differences) and overlap, text)


def format_difference(record: EvaluationRecord, other: EvaluationRecord) -> str:
    """Format the difference between two policies, and say which one is better."""
    difference = compute_paired_difference(record, other)
    mean, low, high = (format_return(difference[name], "+") for name in ("mean", "low", "high"))
    if record.episodes == 1:
        return f"{mean} in the same episode; one episode is too few for a comparison"
    outcome = "no clear difference"
    if difference["low"] > 0.0:
        outcome = "the first is better"
    elif difference["high"] < 0.0:
        outcome = "the other is better"
    return f"{mean}, 95% interval [{low}, {high}] over the same episodes: {outcome}"
