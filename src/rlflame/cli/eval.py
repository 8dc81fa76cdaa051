"""`rlflame eval`. Must not know: how episodes are run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlflame.cli.options import (
    AllowModules,
    Debug,
    EnvFile,
    Fleet,
    Json,
    Local,
    RuntimeSets,
    Workers,
)

if TYPE_CHECKING:
    from rlflame.experiment.evaluation_checks import EvaluationCheck
    from rlflame.storage.checkpoint import Checkpoint
    from rlflame.training.evaluation import EvaluationPlan, EvaluationRecord


def evaluate(
    file: Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint or policy file.")],
    episodes: Annotated[
        int | None, typer.Option(metavar="N", help="How many episodes. [default: 100]", min=1)
    ] = None,
    stochastic: Annotated[
        bool, typer.Option("--stochastic", help="Sample actions instead of taking the best.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Episode seeds are derived from it. [default: 0]", min=0),
    ] = None,
    min_return: Annotated[
        float | None, typer.Option(metavar="X", help="Exit 1 unless the mean return reaches this.")
    ] = None,
    versus: Annotated[
        Path | None,
        typer.Option("--vs", metavar="OTHER", help="Another policy over the same episodes."),
    ] = None,
    expect_recorded: Annotated[
        bool,
        typer.Option(
            "--expect-recorded",
            help="Run the file's recorded evaluation again; exit 1 unless it comes out the same.",
        ),
    ] = False,
    sets: RuntimeSets = None,
    workers: Workers = None,
    fleet: Fleet = None,
    local: Local = False,
    env_file: EnvFile = None,
    allow_modules: AllowModules = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Score a policy over episodes that are always the same."""
    from rlflame.experiment import run_settings

    runtime = run_settings.make_runtime(
        run_settings.collect_runtime_flags(
            workers=workers,
            fleet=fleet,
            local=local,
            env_file=env_file,
            debug=debug,
            allow_modules=allow_modules,
        ),
        sets or (),
    )
    run_settings.limit_threads(1)
    from rlflame import api
    from rlflame.console.output import print_error, print_note
    from rlflame.console.quiet import StatusLine
    from rlflame.errors import ConfigError, RlflameError
    from rlflame.experiment import evaluation_checks, resume
    from rlflame.storage.run_dir import load_policy_file
    from rlflame.training.evaluation import EvaluationPlan
    from rlflame.training.stop_signal import exit_on_signal

    if min_return is not None and not math.isfinite(min_return):
        raise ConfigError(f"--min-return {min_return} is no return.", "--min-return 400")
    source = load_policy_file(file)
    if expect_recorded:
        if versus is not None or stochastic or episodes is not None or seed is not None:
            raise ConfigError(
                "--expect-recorded runs the recorded episodes and no others.",
                "leave out --episodes, --seed, --stochastic and --vs",
            )
        plan = evaluation_checks.make_recorded_plan(source, file)
    else:
        limit = source.recipe.evaluation.max_episode_steps
        plan = EvaluationPlan(episodes or 100, seed or 0, stochastic, limit)
    other = load_policy_file(versus) if versus is not None else None
    if other is not None:
        evaluation_checks.check_comparable(source, other)
    differences = resume.find_machine_differences(source)
    for difference in differences:
        print_note(f"This machine differs from the file's in {difference}; bits may too.")

    with exit_on_signal(), StatusLine() as status_line:
        record = api.evaluate(source, plan, runtime, show=status_line)
        other_record = (
            api.evaluate(other, plan, runtime, show=status_line) if other is not None else None
        )
    verdicts = evaluation_checks.check_evaluation(
        source, record, min_return, differences if expect_recorded else None
    )
    if as_json:
        _print_json(file, source, record, versus, other_record, verdicts)
    else:
        _print_lines(file, source, plan, record, versus, other_record, verdicts)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if failed:
        # The checks are in the JSON object already, and a second one would follow it.
        print_error(RlflameError(failed[0].text), debug=debug)
        raise typer.Exit(1)


def _print_lines(
    file: Path,
    source: Checkpoint,
    plan: EvaluationPlan,
    record: EvaluationRecord,
    versus: Path | None,
    other_record: EvaluationRecord | None,
    verdicts: list[EvaluationCheck],
) -> None:
    from rlflame.console.formatting import format_pairs
    from rlflame.console.output import print_result
    from rlflame.console.recipe_summary import format_evaluation
    from rlflame.experiment import evaluation_checks
    from rlflame.training.evaluation import compute_paired_difference

    learning, action_choice = source.recipe.learning, "sampled" if plan.stochastic else "best"
    lines = [
        ("policy", f"{file}: {learning.environment.id}, {learning.algorithm.upper()}, "
                   f"step {source.progress.steps:,}"),
        ("return", f"{format_evaluation(record)}, {action_choice} actions"),
        ("spread", f"std {record.std:,.1f}, IQM {record.iqm:,.1f}, min {record.min:,.1f}, "
                   f"max {record.max:,.1f}"),
        ("length", f"{record.length_mean:,.1f} steps on average"),
    ]  # fmt: skip
    if other_record is not None:
        difference = compute_paired_difference(record, other_record)
        lines += [
            ("other", f"{versus}: {format_evaluation(other_record)}"),
            (
                "difference",
                f"{difference['mean']:+,.1f}, 95% interval "
                f"[{difference['low']:+,.1f}, {difference['high']:+,.1f}] "
                f"over the same episodes: {evaluation_checks.format_comparison(difference)}",
            ),
        ]
    lines += [("check", verdict.text) for verdict in verdicts if verdict.passed]
    for line in format_pairs(lines):
        print_result(line)


def _print_json(
    file: Path,
    source: Checkpoint,
    record: EvaluationRecord,
    versus: Path | None,
    other_record: EvaluationRecord | None,
    verdicts: list[EvaluationCheck],
) -> None:
    from rlflame.console.output import as_json_text, print_result
    from rlflame.training.evaluation import compute_paired_difference

    fields: dict[str, Any] = {
        "policy": str(file),
        "environment": source.recipe.learning.environment.id,
        "algorithm": source.recipe.learning.algorithm,
        "steps": source.progress.steps,
        **record.as_dict(),
        "passed": all(verdict.passed for verdict in verdicts),
        "checks": [verdict.as_dict() for verdict in verdicts],
    }
    if other_record is not None:
        fields["versus"] = {"policy": str(versus), **other_record.as_dict()}
        fields["difference"] = compute_paired_difference(record, other_record)
    print_result(as_json_text(fields))
