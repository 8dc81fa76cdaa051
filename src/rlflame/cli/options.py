"""Options that several commands share, each explained once. Must not know: commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Worker processes, or executors. [default: all there is room for]"
    ),
]
Learners = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Processes here that compute gradients together, with equal bits.", min=1
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Where torch makes gradients: cpu, cuda, or auto. [default: cpu]"
    ),
]
ScaleBatch = Annotated[
    bool,
    typer.Option("--scale-batch", help="As many times the batch of an update as learners."),
]
ScaleLr = Annotated[
    bool, typer.Option("--scale-lr", help="As many times the learning rate as learners.")
]
Fleet = Annotated[
    str | None,
    typer.Option(
        help="Where rollouts run: local, flame, inline, or auto; where a Flame is configured, auto "
        "times training on both sides and takes the faster.",
        metavar="NAME",
    ),
]
Local = Annotated[
    bool, typer.Option("--local", help="Stay on this machine, where a Flame cluster is configured.")
]
EnvFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.py", help="A file with an environment of yours, shipped to all workers."
    ),
]
AllowModules = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-module",
        metavar="MODULE",
        help="Let the file's environment import this module, which runs its code; repeatable.",
    ),
]
VideoEvery = Annotated[
    int | None,
    typer.Option(
        "--video-every", metavar="N", help="A short film in videos/ every N steps.", min=1
    ),
]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")]
Json = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write curves for TensorBoard into the run folder.")
]
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
RuntimeSets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any runtime setting of `rlflame config`, such as runtime.max_retries=5; repeatable.",
        metavar="NAME=VALUE",
    ),
]
