"""The `rlflame cluster-check` command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import Debug, Json
from rlflame.console.output import as_json_text, print_note, print_result, print_result_lines

if TYPE_CHECKING:
    from rlflame.fleet.flame.check.findings import Diagnosis, Finding


def cluster_check(
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Remove leftovers from dead runs. Live runs are kept."),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Executors to test. [default: all that fit, at most 32]"
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check the Flame cluster and this machine for problems.

    Prints a fix for each problem. Exit codes: 0 (healthy), 1 (degraded), 3 (unreachable).
    """
    from rlflame.fleet.flame.check.cluster_check import ClusterCheck
    from rlflame.rendering.gl_backend import check_graphics
    from rlflame.training.stop_signal import exit_on_signal

    examination = ClusterCheck(
        _print_finding if not as_json else lambda finding: None,
        print_note,
        check_graphics,
        workers=workers,
        clean=clean,
        debug=debug,
    )
    with exit_on_signal():
        diagnosis = examination.run()
    if as_json:
        print_result_lines(as_json_text(diagnosis.as_dict(), indent=2))
    else:
        print_result(_format_verdict(diagnosis))
    if diagnosis.exit_code:
        raise typer.Exit(diagnosis.exit_code)


def _print_finding(finding: Finding) -> None:
    print_result(f"{finding.status:7}  {finding.check:15}  {finding.text}")
    for note in finding.notes:
        print_result(f"{'':26}{note}")
    for fix in finding.fixes:
        print_result(f"{'':9}fix: {fix}")


def _format_verdict(diagnosis: Diagnosis) -> str:
    failures, warnings = diagnosis.list_checks("failed"), diagnosis.list_checks("warning")
    text = diagnosis.verdict.capitalize()
    text += f"; failed: {', '.join(failures)}" if failures else ""
    return text + (f"; warnings: {', '.join(warnings)}." if warnings else ".")
