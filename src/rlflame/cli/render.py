"""`rlflame render`. Must not know: how anything is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlflame.cli.options import AllowModules, Debug, EnvFile, Json

if TYPE_CHECKING:
    from rlflame.rendering.job import Drawing
    from rlflame.storage.checkpoint import Checkpoint


def render(
    file: Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint or policy file.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="A film (.gif, .mp4) or a strip of pictures (.png). [default: ENV.gif]",
        ),
    ] = None,
    episodes: Annotated[
        int, typer.Option(metavar="N", help="How many, one after the other.", min=1, max=1000)
    ] = 1,
    seed: Annotated[
        int, typer.Option(metavar="N", help="The episodes are those of eval's seed.", min=0)
    ] = 0,
    best_of: Annotated[
        int | None,
        typer.Option(metavar="N", help="The best of the first N episodes.", min=1, max=100_000),
    ] = None,
    vs_untrained: Annotated[
        bool,
        typer.Option("--vs-untrained", help="On the left, the policy that training began with."),
    ] = False,
    width: Annotated[
        int | None, typer.Option(metavar="N", help="Of one picture, in pixels.", min=32, max=4096)
    ] = None,
    height: Annotated[
        int | None, typer.Option(metavar="N", help="The same; either follows.", min=32, max=4096)
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Frames a second, about; time stays real. [default: 25, .mp4: 50]",
            min=1,
            max=1000,
        ),
    ] = None,
    human: Annotated[
        bool, typer.Option("--human", help="In a window, where there is a display.")
    ] = False,
    env_file: EnvFile = None,
    allow_modules: AllowModules = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw what a policy does: the very episodes that eval scores, also without a display."""
    from rlflame.experiment import run_settings

    run_settings.runtime_flags(
        workers=None,
        fleet=None,
        local=False,
        env_file=env_file,
        debug=debug,
        allow_modules=allow_modules,
    )
    run_settings.limit_threads(1)
    from rlflame import api
    from rlflame.config import resolve
    from rlflame.console.output import say_aside
    from rlflame.console.quiet import Tally
    from rlflame.errors import ConfigError
    from rlflame.experiment import resume
    from rlflame.rendering import video
    from rlflame.storage.run_dir import named_policy

    if human and out is not None:
        raise ConfigError("--human and -o exclude each other.", "leave out one")
    source = named_policy(file)
    if not human:
        out = out or Path(f"{resolve.short_name(source.env.id)}.gif")
    wish = video.Wish(
        "window" if out is None else video.kind_of(out),
        seed, episodes, best_of, vs_untrained, width, height, fps,
    )  # fmt: skip
    for difference in resume.machine_differences(source):
        say_aside(f"This machine differs from the file's in {difference}; bits may too.")
    with Tally() as show:
        drawing = api.render(source, wish, out, show_output=debug, tell=show.drawing)
    for note in drawing.notes:
        say_aside(note)
    if as_json:
        _print_json(file, out, source, drawing)
    else:
        _print_lines(file, out, source, drawing)


def _print_lines(file: Path, out: Path | None, source: Checkpoint, drawing: Drawing) -> None:
    from rlflame.console.formatting import aligned
    from rlflame.console.output import say
    from rlflame.text import format_count

    learning = source.recipe.learning
    lines = [
        ("policy", f"{file}: {learning.environment.id}, {learning.algorithm.upper()}, "
                   f"step {source.progress.steps:,}"),
    ]  # fmt: skip
    lines += [
        ("episode", f"{one.episode}: return {one.episode_return:,.1f}, "
                    f"{format_count(one.length, 'step')}")
        for one in drawing.episodes
    ]  # fmt: skip
    if out is not None:
        lasts = f", {drawing.seconds:.1f} s" if drawing.seconds else ""
        lines.append(
            ("file", f"{out}: {drawing.width} x {drawing.height}, "
                     f"{format_count(drawing.frames, 'picture')}{lasts}, "
                     f"{len(drawing.data) / 1e6:.2f} MB")
        )  # fmt: skip
    for line in aligned(lines):
        say(line)


def _print_json(file: Path, out: Path | None, source: Checkpoint, drawing: Drawing) -> None:
    from rlflame.console.output import as_json_text, say

    learning = source.recipe.learning
    said: dict[str, Any] = {
        "policy": str(file),
        "environment": learning.environment.id,
        "algorithm": learning.algorithm,
        "steps": source.progress.steps,
        "file": None if out is None else str(out),
        "bytes": len(drawing.data),
        "width": drawing.width,
        "height": drawing.height,
        "frames": drawing.frames,
        "seconds": drawing.seconds,
        "episodes": [one.as_dict() for one in drawing.episodes],
        "notes": drawing.notes,
    }
    say(as_json_text(said))
