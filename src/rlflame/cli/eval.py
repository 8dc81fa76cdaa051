"""The `rlflame eval` command."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlflame.cli.options import (
    CheckpointFile,
    Json,
    add_flag_options,
    load_named_policy,
    load_source,
    print_machine_note,
    print_pairs,
)
from rlflame.config.flags import RuntimeFlags
from rlflame.console.output import as_json_text, print_error, print_result
from rlflame.errors import ConfigError, RlflameError

if TYPE_CHECKING:
    from rlflame.experiment.comparison import EvaluationCheck
    from rlflame.storage.checkpoint import Checkpoint
    from rlflame.training.evaluation import EvaluationRecord

Episodes = Annotated[
    int | None, typer.Option(metavar="N", help="Number of episodes. [default: 100]", min=1)
]
Stochastic = Annotated[
    bool, typer.Option("--stochastic", help="Use sampled instead of deterministic actions.")
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="Seed for the episodes. [default: 0]", min=0)
]
MinReturn = Annotated[
    float | None, typer.Option(metavar="X", help="Exit with code 1 if the mean return is below X.")
]
Versus = Annotated[
    Path | None,
    typer.Option("--vs", metavar="OTHER", help="Compare with this policy on the same episodes."),
]
BetterThan = Annotated[
    float | None,
    typer.Option(
        "--better-than",
        metavar="X",
        help="Exit with code 1 unless the 95% interval of the difference to OTHER is above X.",
    ),
]
ExpectRecorded = Annotated[
    bool,
    typer.Option(
        "--expect-recorded",
        help="Repeat the evaluation recorded in CKPT. Exit with code 1 if the returns differ or, "
        "on another kind of machine, if the 95% intervals do not overlap.",
    ),
]


@add_flag_options("sets", "workers", "fleet", "local", "env_file", "allow_modules", "debug")
def evaluate(
    file: CheckpointFile,
    flags: RuntimeFlags,
    episodes: Episodes = None,
    stochastic: Stochastic = False,
    seed: Seed = None,
    min_return: MinReturn = None,
    versus: Versus = None,
    better_than: BetterThan = None,
    expect_recorded: ExpectRecorded = False,
    as_json: Json = False,
) -> None:
    """Evaluate a policy on a fixed set of episodes."""
    _check_limit("--min-return", min_return, "400")
    _check_limit("--better-than", better_than, "0")
    if better_than is not None and versus is None:
        raise ConfigError(
            "--better-than compares two policies, but there is only one.",
            f"--vs OTHER --better-than {better_than:g}",
        )
    if better_than is not None and episodes == 1:
        raise ConfigError(
            "--better-than needs at least 2 episodes, because one episode has no interval.",
            "--episodes 100",
        )
    if expect_recorded and (versus, episodes, seed, stochastic) != (None, None, None, False):
        raise ConfigError(
            "--expect-recorded runs only the recorded episodes.",
            "leave out --episodes, --seed, --stochastic and --vs",
        )
    file, source, runtime = load_source(file, flags)
    from rlflame import api
    from rlflame.console.display import StatusLine
    from rlflame.experiment import comparison, resume
    from rlflame.training.evaluation import EvaluationPlan
    from rlflame.training.stop_signal import exit_on_signal

    limit = source.recipe.evaluation.max_episode_steps
    plan = EvaluationPlan(episodes or 100, seed or 0, stochastic, limit)
    if expect_recorded:
        plan = comparison.make_recorded_plan(source, file)
    other = None
    if versus is not None:
        versus, other = load_named_policy(versus)
        comparison.check_comparable(source, other)
    with exit_on_signal(), StatusLine() as show:
        record = api.evaluate(source, plan, runtime, show=show)
        other_record = api.evaluate(other, plan, runtime, show=show) if other else None
    if not (stochastic or expect_recorded):
        print_machine_note(source, record.seed, dict(enumerate(record.returns)))
    differences = resume.find_machine_differences(source) if expect_recorded else None
    checks = comparison.check_evaluation(source, record, min_return, differences)
    if other_record is not None and better_than is not None:
        checks.append(comparison.check_difference(record, other_record, better_than))
    print_outcome = _print_json if as_json else _print_lines
    print_outcome(file, source, record, checks, versus, other_record)
    _exit_unless_passed(checks, debug=flags.debug)


def _check_limit(option: str, limit: float | None, example: str) -> None:
    if limit is not None and not math.isfinite(limit):
        raise ConfigError(f"{option} {limit} is not a finite number.", f"{option} {example}")


def _exit_unless_passed(checks: list[EvaluationCheck], *, debug: bool) -> None:
    for check in checks:
        if not check.passed:
            # The JSON object already has the checks; a second one must not follow it.
            print_error(RlflameError(check.text), debug=debug)
            raise typer.Exit(1)


def _print_lines(
    file: Path,
    source: Checkpoint,
    record: EvaluationRecord,
    checks: list[EvaluationCheck],
    versus: Path | None,
    other_record: EvaluationRecord | None,
) -> None:
    from rlflame.console.recipe_summary import format_evaluation
    from rlflame.experiment import comparison
    from rlflame.terminal_text import format_return

    learning, choice = source.recipe.learning, "sampled" if record.stochastic else "most likely"
    lines = [
        ("policy", f"{file}: {learning.environment.id}, {learning.algorithm.upper()}, "
                   f"step {source.progress.steps:,}"),
        ("return", f"{format_evaluation(record)}, {choice} actions"),
        ("spread", f"std {format_return(record.std)}, IQM {format_return(record.iqm)}, "
                   f"min {format_return(record.min)}, max {format_return(record.max)}"),
        ("length", f"{record.length_mean:,.1f} steps on average"),
    ]  # fmt: skip
    if other_record is not None:
        lines += [
            ("other", f"{versus}: {format_evaluation(other_record)}"),
            ("difference", comparison.format_difference(record, other_record)),
        ]
    print_pairs([*lines, *(("check", check.text) for check in checks if check.passed)])


def _print_json(
    file: Path,
    source: Checkpoint,
    record: EvaluationRecord,
    checks: list[EvaluationCheck],
    versus: Path | None,
    other_record: EvaluationRecord | None,
) -> None:
    from rlflame.training.evaluation import compute_paired_difference

    fields: dict[str, Any] = {
        "policy": str(file),
        "environment": source.recipe.learning.environment.id,
        "algorithm": source.recipe.learning.algorithm,
        "steps": source.progress.steps,
        **record.as_dict(),
        "passed": all(check.passed for check in checks),
        "checks": checks,
    }
    if other_record is not None:
        fields["versus"] = {"policy": str(versus), **other_record.as_dict()}
        fields["difference"] = compute_paired_difference(record, other_record)
    print_result(as_json_text(fields))
