"""`rlflame report`. Must not know: how runs are read, compared or written about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import Debug, Json

if TYPE_CHECKING:
    from rlflame.analysis.report.build import Composed

SUFFIXES = (".md", ".html", ".json")
SEPARATOR = "--vs"


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [--vs RUN...]",
            help="Run folders, folders of them, or .json results of a benchmark; behind --vs those "
            "to compare with.",
        ),
    ],
    require: Annotated[
        str | None,
        typer.Option(
            metavar="CLAIM",
            help="better, equivalent or not-worse than what is behind --vs; exit 1 unless shown.",
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(metavar="PERCENT", help="A difference within it counts as equivalent."),
    ] = 10.0,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="A .md, .html or .json file; - is Markdown here. [default: -]",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what ran on what, how fast and how good, seeds taken together.

    With --vs, whether it is better, equivalent or not worse.
    """
    del debug
    from rlflame.analysis.report import build
    from rlflame.console.output import say, say_aside, say_lines, takes
    from rlflame.errors import ConfigError, ending, shell
    from rlflame.storage import safetensors_file

    ours, theirs = _sides(runs)
    if require is not None and require not in build.CLAIMS:
        raise ConfigError(
            f"--require {require!r} is no claim.", f"--require {', '.join(build.CLAIMS)}"
        )
    if require is not None and not theirs:
        raise ConfigError("--require needs something to compare with.", "--vs RUN...")
    if not 0.0 < margin < 100.0:
        raise ConfigError(f"--margin is {margin:g}.", "--margin 10, in percent")
    if str(out) == "-":
        out = None
    if out is not None and out.suffix not in SUFFIXES:
        raise ConfigError(
            f"A report is written as {', '.join(s[1:] for s in SUFFIXES)}, not {str(out)!r}.",
            shell("-o", ending(out, ".html", "report")),
        )
    found = build.compose(ours, theirs, margin / 100.0)
    for note in found.notes:
        say_aside(note)
    if out is not None:
        safetensors_file.write_atomically(out, _written(found, out.suffix).encode())
        # Beside JSON, where it was written is no part of the result.
        (say_aside if as_json else say)(str(out))
    if as_json or out is None:
        readable = _written(found, ".json" if as_json else ".md", ascii_only=not takes("±⣿└"))
        say_lines(readable.rstrip())
    if require is not None:
        build.demand(found, require)


def _sides(words: list[str]) -> tuple[list[Path], list[Path]]:
    """What stands before --vs, and what stands behind it."""
    from rlflame.errors import ConfigError

    sides: tuple[list[Path], list[Path]] = [], []
    side = 0
    for word in words:
        name, equals, value = word.partition("=")
        if name == SEPARATOR:
            side = 1
            if equals:
                sides[1].append(Path(value))
        elif word.startswith("-"):
            raise ConfigError(f"There is no option {word}.", "rlflame report --help")
        else:
            sides[side].append(Path(word))
    if not sides[0] or (side and not sides[1]):
        raise ConfigError(
            f"There are no runs {'behind' if sides[0] else 'before'} --vs.",
            "rlflame report RUN... --vs RUN...",
        )
    return sides


def _written(found: Composed, suffix: str, *, ascii_only: bool = False) -> str:
    from rlflame.analysis.report import html, markdown
    from rlflame.console.output import as_json_text

    if suffix == ".json":
        return as_json_text(found.facts, indent=2) + "\n"
    if suffix == ".html":
        return html.written(found.document)
    return markdown.written(found.document, ascii_only=ascii_only)
