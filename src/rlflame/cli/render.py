"""The `rlflame render` command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import (
    AllowModules,
    CheckpointFile,
    Debug,
    EnvFile,
    Json,
    load_source,
    print_machine_note,
    print_pairs,
)
from rlflame.config.flags import RuntimeFlags
from rlflame.console.output import as_json_text, print_result
from rlflame.errors import ConfigError
from rlflame.terminal_text import format_count

if TYPE_CHECKING:
    from rlflame.rendering.job import RenderResult
    from rlflame.storage.checkpoint import Checkpoint

VideoFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Output file: a .gif or .mp4 video, or a .png strip of images. [default: ENV.gif]",
    ),
]
FrameRate = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="Frames per second. Does not change the playback speed. [default: 25; 50 for .mp4]",
        min=1,
        max=1000,
    ),
]


def render(
    file: CheckpointFile,
    out: VideoFile = None,
    episodes: Annotated[
        int, typer.Option(metavar="N", help="Number of episodes to render.", min=1, max=1000)
    ] = 1,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed for the episodes, as in `rlflame eval`.", min=0)
    ] = 0,
    best_of: Annotated[
        int | None,
        typer.Option(metavar="N", help="Play N episodes and render the best.", min=1, max=100_000),
    ] = None,
    vs_untrained: Annotated[
        bool, typer.Option("--vs-untrained", help="Also show the untrained policy, on the left.")
    ] = False,
    width: Annotated[
        int | None,
        typer.Option(metavar="N", help="Width of each image in pixels.", min=32, max=4096),
    ] = None,
    height: Annotated[
        int | None,
        typer.Option(metavar="N", help="Height of each image in pixels.", min=32, max=4096),
    ] = None,
    fps: FrameRate = None,
    human: Annotated[bool, typer.Option("--human", help="Show the video in a window.")] = False,
    env_file: EnvFile = None,
    allow_modules: AllowModules = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Render episodes of a policy as a video or an image. Only --human needs a display."""
    if human and out is not None:
        raise ConfigError("--human and -o cannot be combined.", "omit one of them")
    flags = RuntimeFlags(env_file=env_file, allow_modules=allow_modules)
    file, source, _ = load_source(file, flags)
    from rlflame import api
    from rlflame.config.preset_catalog import make_short_name
    from rlflame.console.display import StatusLine
    from rlflame.rendering.job import RenderOptions
    from rlflame.rendering.policy_render import resolve_kind

    if not human:
        out = out or Path(f"{make_short_name(source.env.id)}.gif")
    kind = "window" if out is None else resolve_kind(out)
    options = RenderOptions(kind, seed, episodes, best_of, vs_untrained, width, height, fps)
    with StatusLine() as status_line:
        drawing = api.render(
            source, options, out, show_output=debug, report_progress=status_line.show_status
        )
    returns = {episode.episode: episode.episode_return for episode in drawing.episodes}
    print_machine_note(source, seed, returns)
    print_drawing = _print_json if as_json else _print_lines
    print_drawing(file, out, source, drawing)


def _print_lines(file: Path, out: Path | None, source: Checkpoint, drawing: RenderResult) -> None:
    name = source.recipe.learning.algorithm.upper()
    lines = [("policy", f"{file}: {source.env.id}, {name}, step {source.progress.steps:,}")]
    for episode in drawing.episodes:
        steps = format_count(episode.length, "step")
        text = f"{episode.episode}: return {episode.episode_return:,.1f}, {steps}"
        lines.append(("episode", text))
    if out is not None:
        pictures = format_count(drawing.frames, "frame")
        duration = f", {drawing.seconds:.1f} s" if drawing.seconds else ""
        size = f"{drawing.width} x {drawing.height}, {pictures}{duration}"
        lines.append(("file", f"{out}: {size}, {len(drawing.data) / 1e6:.2f} MB"))
    print_pairs(lines)


def _print_json(file: Path, out: Path | None, source: Checkpoint, drawing: RenderResult) -> None:
    values = asdict(drawing)
    data = values.pop("data")
    fields = {
        "policy": str(file),
        "environment": source.env.id,
        "algorithm": source.recipe.learning.algorithm,
        "steps": source.progress.steps,
        "file": None if out is None else str(out),
        "bytes": len(data),
        **values,
    }
    print_result(as_json_text(fields))
