"""What an evaluation is measured against: a bar, another policy, or its own record.

Must not know: how episodes are run, display.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlflame.config.toml_io import written
from rlflame.errors import CheckpointError, ConfigError, typed
from rlflame.rollout.spec import EnvSpec
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.evaluation import EvaluationPlan, EvaluationRecord


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a check passed, in a sentence."""

    check: str
    passed: bool
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def recorded_plan(source: Checkpoint, file: Path) -> EvaluationPlan:
    """The episodes that the file says it was scored on."""
    recorded = source.evaluation
    if recorded is None:
        raise CheckpointError(
            f"{file} has no recorded evaluation.", f"score it: {typed('eval', file)}"
        )
    return EvaluationPlan(
        recorded.episodes, recorded.seed, recorded.stochastic, recorded.max_episode_steps
    )


def check_comparable(a: Checkpoint, b: Checkpoint) -> None:
    """Only policies for the same environment can play the same episodes."""
    if a.env != b.env:
        raise ConfigError(
            "--vs compares policies of one environment, and these are for "
            f"{_told(a.env)} and {_told(b.env)}.",
            "rlflame inspect shows what a file was trained on",
        )


def _told(env: EnvSpec) -> str:
    text = env.id
    if env.kwargs:
        text += f" with {written(dict(env.kwargs))}"
    return text + (f" of {env.max_episode_steps:,} steps" if env.max_episode_steps else "")


def verdicts(
    source: Checkpoint,
    record: EvaluationRecord,
    min_return: float | None,
    differences: Sequence[str] | None,
) -> list[Verdict]:
    """The checks that were asked for; `differences` of machines where the record is one of them."""
    found = []
    if min_return is not None:
        passed = record.mean >= min_return
        word = "reaches" if passed else "is below"
        text = f"The mean return {record.mean:,.1f} {word} {min_return:,g}."
        found.append(Verdict("min_return", passed, text))
    if differences is not None:
        assert source.evaluation is not None
        found.append(against_record(source.evaluation, record, differences))
    return found


def against_record(
    recorded: EvaluationRecord, record: EvaluationRecord, differences: Sequence[str]
) -> Verdict:
    """Equal to the last bit on an equal machine; elsewhere, intervals that overlap."""
    if record.returns == recorded.returns and record.lengths == recorded.lengths:
        return Verdict(
            "recorded", True, f"All {record.episodes} returns are the recorded ones, bit for bit."
        )
    ours = list(zip(record.returns, record.lengths, strict=True))
    theirs = list(zip(recorded.returns, recorded.lengths, strict=True))
    pairs = enumerate(zip(ours, theirs, strict=True))
    episode = next(k for k, (one, other) in pairs if one != other)
    seen = (
        f"episode {episode} returned {record.returns[episode]!r}, "
        f"recorded is {recorded.returns[episode]!r}"
    )
    if not differences:
        return Verdict(
            "recorded",
            False,
            f"Not the recorded returns, on a machine like the recorded one: {seen}.",
        )
    overlap = record.low <= recorded.high and recorded.low <= record.high
    intervals = (
        f"the interval [{record.low:,.1f}, {record.high:,.1f}] "
        f"{'overlaps' if overlap else 'lies apart from'} the recorded "
        f"[{recorded.low:,.1f}, {recorded.high:,.1f}]"
    )
    return Verdict(
        "recorded",
        overlap,
        f"This machine differs in {'; '.join(differences)}: {seen}, and {intervals}.",
    )


def words(found: dict[str, float]) -> str:
    if found["low"] > 0.0:
        return "the first is better"
    return "the other is better" if found["high"] < 0.0 else "no clear difference"
