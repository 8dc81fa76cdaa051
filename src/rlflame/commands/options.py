"""Options that several commands share, each explained once. Must not know: commands."""

from __future__ import annotations

from typing import Annotated

import typer

Workers = Annotated[
    int | None,
    typer.Option(metavar="N", help="Worker processes. [default: one per usable core]"),
]
Fleet = Annotated[
    str | None, typer.Option(help="Where rollouts run: local, inline, or auto.", metavar="NAME")
]
Local = Annotated[bool, typer.Option("--local", help="Stay on this machine.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")]
Json = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the run folder, at the end.")]
Plain = Annotated[bool, typer.Option("--plain", help="Lines, also on a terminal.")]
Debug = Annotated[bool, typer.Option("--debug", help="Tracebacks, and what environments print.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any setting of `rlflame config`, such as ppo.clip_range=0.1; repeatable.",
        metavar="NAME=VALUE",
    ),
]
