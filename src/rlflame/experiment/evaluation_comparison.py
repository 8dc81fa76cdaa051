"""Checks of an evaluation: against a bar, another policy, or its own record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlflame.config.toml_io import format_value
from rlflame.errors import CheckpointError, ConfigError, format_command
from rlflame.rollout.task import EnvSpec
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.evaluation import EvaluationPlan, EvaluationRecord


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
        word = "reaches" if passed else "is below"
        text = f"The mean return {record.mean:,.1f} {word} {min_return:,g}."
        checks.append(EvaluationCheck("min_return", passed, text))
    if differences is not None:
        assert source.evaluation is not None
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
    episodes = list(zip(record.returns, record.lengths, strict=True))
    expected_episodes = list(zip(expected.returns, expected.lengths, strict=True))
    pairs = enumerate(zip(episodes, expected_episodes, strict=True))
    episode = next(k for k, (actual, reference) in pairs if actual != reference)
    difference = (
        f"episode {episode} returned {record.returns[episode]!r}, "
        f"recorded is {expected.returns[episode]!r}"
    )
    if not differences:
        return EvaluationCheck(
            "recorded",
            False,
            f"Not the recorded returns, on a machine like the recorded one: {difference}.",
        )
    overlap = record.low <= expected.high and expected.low <= record.high
    intervals = (
        f"the interval [{record.low:,.1f}, {record.high:,.1f}] "
        f"{'overlaps' if overlap else 'lies apart from'} the recorded "
        f"[{expected.low:,.1f}, {expected.high:,.1f}]"
    )
    return EvaluationCheck(
        "recorded",
        overlap,
        f"This machine differs in {'; '.join(differences)}: {difference}, and {intervals}.",
    )


def format_comparison(interval: dict[str, float]) -> str:
    if interval["low"] > 0.0:
        return "the first is better"
    return "the other is better" if interval["high"] < 0.0 else "no clear difference"
