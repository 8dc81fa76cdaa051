"""The `rlflame report` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import Debug, Json
from rlflame.console.output import (
    as_json_text,
    can_encode,
    print_note,
    print_result,
    print_result_lines,
)
from rlflame.errors import ConfigError

if TYPE_CHECKING:
    from rlflame.analysis.report.build import Report

SUFFIXES = (".md", ".html", ".json")
SEPARATOR = "--vs"
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN... [--vs RUN...]",
        help="Run folders, folders that contain them, or .json results of `rlflame bench`. The "
        "runs after --vs are the baseline.",
    ),
]
Require = Annotated[
    str | None,
    typer.Option(
        metavar="CLAIM",
        help="Exit with code 1 unless the data supports CLAIM: better, equivalent or not-worse.",
    ),
]
Margin = Annotated[
    float, typer.Option(metavar="PERCENT", help="Largest difference that counts as equivalent.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="FILE",
        help="Output file (.md, .html or .json), or - to print Markdown. [default: -]",
    ),
]


def report(
    runs: Runs,
    require: Require = None,
    margin: Margin = 10.0,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Report the returns, speed, curves and machines of runs.

    With --vs, test whether the runs are better than, equivalent to, or not worse than other runs.
    """
    from rlflame.analysis.report import build
    from rlflame.storage import safetensors_file

    paths, baseline_paths = _split_sides(runs)
    claims = build.CLAIMS if baseline_paths else ()
    if require is not None and require not in claims:
        raise ConfigError(
            f"--require {require!r} cannot be checked without a known claim and runs after --vs.",
            f"--vs RUN... --require {', '.join(build.CLAIMS)}",
        )
    if not 0.0 < margin < 100.0:
        raise ConfigError(f"--margin is {margin:g}, not between 0 and 100 percent.", "--margin 10")
    if str(out) == "-":
        out = None
    if out is not None and out.suffix not in SUFFIXES:
        raise ConfigError(
            f"A report is written as a .md, .html or .json file, not as {str(out)!r}.",
            "-o report.html",
        )
    content = build.build_report(paths, baseline_paths, margin / 100.0)
    for note in content.notes:
        print_note(note)
    if out is not None:
        safetensors_file.write_atomically(out, _format_report(content, out.suffix).encode())
        # With --json, the path is a note, because the result is only the JSON.
        (print_note if as_json else print_result)(str(out))
    if as_json or out is None:
        suffix, ascii_only = ".json" if as_json else ".md", not can_encode("±⣿└")
        print_result_lines(_format_report(content, suffix, ascii_only=ascii_only).rstrip())
    if require is not None:
        content.check_claim(require)


def _split_sides(words: list[str]) -> tuple[list[Path], list[Path]]:
    """Return the paths before and after --vs."""
    at = words.index(SEPARATOR) if SEPARATOR in words else len(words)
    head, tail = words[:at], words[at + 1 :]
    if unknown := [word for word in head + tail if word.startswith("-")]:
        raise ConfigError(f"There is no option {unknown[0]}.", "rlflame report A --vs B")
    if not head or (at < len(words) and not tail):
        raise ConfigError("One side of --vs has no runs.", "rlflame report A --vs B")
    return [Path(word) for word in head], [Path(word) for word in tail]


def _format_report(content: Report, suffix: str, *, ascii_only: bool = False) -> str:
    from rlflame.analysis.report import document

    if suffix == ".json":
        return as_json_text(content.facts, indent=2) + "\n"
    if suffix == ".html":
        return document.to_html(content.document)
    return document.to_markdown(content.document, ascii_only=ascii_only)
