"""Options as annotated types, each explained once: a command names the type of its parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CheckpointFile = Annotated[
    Path, typer.Argument(metavar="CKPT", help="A checkpoint or policy file.")
]
Env = Annotated[
    str | None,
    typer.Option(
        metavar="ENV",
        help="An alias of `rlflame envs`, a Gymnasium id, or module:Id. [default: cartpole]",
    ),
]
Algo = Annotated[
    str | None, typer.Option(metavar="ALGO", help="ppo, reinforce or sac. [default: ppo]")
]
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A preset of `rlflame envs`, not the environment's own."),
]
Steps = Annotated[
    int | None, typer.Option(metavar="N", help="Stop after this many environment steps.")
]
TotalSteps = Annotated[
    int | None, typer.Option(metavar="N", help="Train on to this many steps in all.")
]
Iterations = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="REINFORCE: stop after this many iterations. [reinforce-classic: 100]"
    ),
]
EpisodesPerIteration = Annotated[
    int | None,
    typer.Option(metavar="N", help="REINFORCE: episodes in an iteration. [reinforce-classic: 100]"),
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="All randomness follows from it. [default: 0]")
]
Seeds = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Several seeds as one job, such as 0-9 or 0,3,7."),
]
ConfigFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A TOML file of settings, over the preset.")
]
EnvKwargs = Annotated[
    list[str] | None,
    typer.Option(help="An argument of the environment; repeatable.", metavar="KEY=VALUE"),
]
InitFrom = Annotated[
    Path | None, typer.Option(help="Start from the policy in this file.", metavar="CKPT")
]
UntilReturn = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Stop once an evaluation's 95% interval lies above this return."
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The run folder. [default: runs/ENV-ALGO-SEED]"),
]
PlotReturns = Annotated[
    bool, typer.Option("--plot", help="Draw the episodes' returns into the run folder.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved config as TOML and stop.")
]
ExistingRun = Annotated[
    Path, typer.Argument(help="A run folder, a checkpoint in one, or a folder of --seeds.")
]
FreshReplay = Annotated[
    bool,
    typer.Option(
        "--fresh-replay",
        help="Keep the weights and begin with an empty replay; where its files are lost.",
    ),
]
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
FilmFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="A film (.gif, .mp4) or a strip of pictures (.png). [default: ENV.gif]",
    ),
]
FilmEpisodes = Annotated[
    int, typer.Option(metavar="N", help="How many, one after the other.", min=1, max=1000)
]
FilmSeed = Annotated[
    int, typer.Option(metavar="N", help="The episodes are those of eval's seed.", min=0)
]
BestOf = Annotated[
    int | None,
    typer.Option(metavar="N", help="The best of the first N episodes.", min=1, max=100_000),
]
VersusUntrained = Annotated[
    bool,
    typer.Option("--vs-untrained", help="On the left, the policy that training began with."),
]
PictureWidth = Annotated[
    int | None, typer.Option(metavar="N", help="Of one picture, in pixels.", min=32, max=4096)
]
PictureHeight = Annotated[
    int | None, typer.Option(metavar="N", help="The same; either follows.", min=32, max=4096)
]
FrameRate = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="Frames a second, about; time stays real. [default: 25, .mp4: 50]",
        min=1,
        max=1000,
    ),
]
Window = Annotated[bool, typer.Option("--human", help="In a window, where there is a display.")]
