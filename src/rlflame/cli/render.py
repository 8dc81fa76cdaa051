"""`rlflame render`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlflame.cli.options import (
    AllowModules,
    BestOf,
    Debug,
    EnvFile,
    FilmEpisodes,
    FilmFile,
    FilmSeed,
    FrameRate,
    Json,
    PictureHeight,
    PictureWidth,
    VersusUntrained,
    Window,
)

if TYPE_CHECKING:
    from rlflame.rendering.job import RenderResult
    from rlflame.storage.checkpoint import Checkpoint


def render(
    file: Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint or policy file.")],
    out: FilmFile = None,
    episodes: FilmEpisodes = 1,
    seed: FilmSeed = 0,
    best_of: BestOf = None,
    vs_untrained: VersusUntrained = False,
    width: PictureWidth = None,
    height: PictureHeight = None,
    fps: FrameRate = None,
    human: Window = False,
    env_file: EnvFile = None,
    allow_modules: AllowModules = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw what a policy does: the very episodes that eval scores, also without a display."""
    from rlflame.config.flags import RuntimeFlags
    from rlflame.config.resolve import resolve_runtime
    from rlflame.rollout.blas import limit_threads

    resolve_runtime(RuntimeFlags(env_file=env_file, allow_modules=allow_modules))
    limit_threads(1)
    from rlflame import api
    from rlflame.config import resolve
    from rlflame.console.display import StatusLine
    from rlflame.console.output import print_note
    from rlflame.errors import ConfigError
    from rlflame.experiment import resume
    from rlflame.rendering.job import RenderOptions
    from rlflame.rendering.policy_render import resolve_kind
    from rlflame.storage.run_folder import load_policy_file

    if human and out is not None:
        raise ConfigError("--human and -o exclude each other.", "leave out one")
    source = load_policy_file(file)
    if not human:
        out = out or Path(f"{resolve.make_short_name(source.env.id)}.gif")
    kind = "window" if out is None else resolve_kind(out)
    options = RenderOptions(kind, seed, episodes, best_of, vs_untrained, width, height, fps)
    for difference in resume.find_machine_differences(source):
        print_note(f"This machine differs from the file's in {difference}; bits may too.")
    with StatusLine() as status_line:
        drawing = api.render(
            source, options, out, show_output=debug, report_progress=status_line.show_rendering
        )
    for note in drawing.notes:
        print_note(note)
    print_drawing = _print_json if as_json else _print_lines
    print_drawing(file, out, source, drawing)


def _print_lines(file: Path, out: Path | None, source: Checkpoint, drawing: RenderResult) -> None:
    from rlflame.console.output import format_pairs, print_result
    from rlflame.terminal_text import format_count

    learning = source.recipe.learning
    lines = [
        ("policy", f"{file}: {learning.environment.id}, {learning.algorithm.upper()}, "
                   f"step {source.progress.steps:,}"),
    ]  # fmt: skip
    lines += [
        ("episode", f"{episode.episode}: return {episode.episode_return:,.1f}, "
                    f"{format_count(episode.length, 'step')}")
        for episode in drawing.episodes
    ]  # fmt: skip
    if out is not None:
        duration_text = f", {drawing.seconds:.1f} s" if drawing.seconds else ""
        lines.append(
            ("file", f"{out}: {drawing.width} x {drawing.height}, "
                     f"{format_count(drawing.frames, 'picture')}{duration_text}, "
                     f"{len(drawing.data) / 1e6:.2f} MB")
        )  # fmt: skip
    for line in format_pairs(lines):
        print_result(line)


def _print_json(file: Path, out: Path | None, source: Checkpoint, drawing: RenderResult) -> None:
    from rlflame.console.output import as_json_text, print_result

    learning = source.recipe.learning
    fields: dict[str, Any] = {
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
        "episodes": [episode.as_dict() for episode in drawing.episodes],
        "notes": drawing.notes,
    }
    print_result(as_json_text(fields))
