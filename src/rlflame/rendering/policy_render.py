"""A policy's file turned into a picture or a film. Must not know: the command line, pixels."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlflame.errors import CheckpointError, ConfigError, format_shell, replace_suffix
from rlflame.rendering import episodes, render_subprocess
from rlflame.rendering.job import KIND_BY_SUFFIX, RenderJob, RenderKind, RenderResult
from rlflame.rollout.spec import PolicyArrays
from rlflame.storage import safetensors_file
from rlflame.storage.checkpoint import Checkpoint

#: What a GIF may weigh before it loses colours and frames.
MAX_GIF_BYTES = 5_000_000


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What a user wants to see."""

    kind: RenderKind
    seed: int = 0
    episodes: int = 1
    best_of: int | None = None
    versus_untrained: bool = False
    width: int | None = None
    height: int | None = None
    fps: float | None = None


def resolve_kind(out: Path) -> RenderKind:
    """The kind of a file by its name, and whether it can be written where it is to be."""
    kind = KIND_BY_SUFFIX.get(out.suffix.lower())
    if kind is None:
        raise ConfigError(
            f"-o {str(out)!r} ends neither .gif nor .mp4 nor .png.",
            format_shell("-o", replace_suffix(out, ".gif", "film")),
        )
    if kind == "mp4":
        from rlflame.rendering import encoders  # needs Pillow, which takes long to load

        encoders.check_video()
    if out.is_dir():
        raise CheckpointError(f"{out} is a folder.", "-o with the name of a file")
    folder = out.absolute().parent
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder.", format_shell("mkdir", "-p", folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} cannot be written.", "-o in another folder")
    return kind


def check_options(options: RenderOptions) -> None:
    """What cannot be meant, before anything is played."""
    if options.best_of is not None and options.best_of < options.episodes:
        raise ConfigError(
            f"--best-of {options.best_of} is fewer than --episodes {options.episodes}.",
            f"--best-of {options.episodes * 10}",
        )
    if options.kind == "window" and options.versus_untrained:
        raise ConfigError("--human shows one policy.", "-o film.gif --vs-untrained")
    if options.kind == "gif" and options.fps is not None:
        from rlflame.rendering import encoders

        encoders.check_gif_rate(options.fps)


def make_job(
    source: Checkpoint, options: RenderOptions, untrained: PolicyArrays | None = None
) -> RenderJob:
    """The drawing that a wish means for a policy: the episodes that `eval` scores."""
    captions, policies = [make_caption(source)], [source.policy]
    if untrained is not None:
        captions.insert(0, "untrained")
        policies.insert(0, untrained)
    return RenderJob(
        env=source.env,
        policy=source.policy_spec,
        captions=tuple(captions),
        policies=tuple(policies),
        kind=options.kind,
        seed=options.seed,
        episodes=options.episodes,
        best_of=options.best_of or options.episodes,
        max_episode_steps=source.recipe.evaluation.max_episode_steps,
        width=options.width,
        height=options.height,
        fps=options.fps,
        # Whoever names a rate gets that rate.
        max_bytes=MAX_GIF_BYTES if options.fps is None else None,
    )


def make_caption(source: Checkpoint) -> str:
    return f"{source.recipe.learning.algorithm.upper()}, step {source.progress.steps:,}"


def render(
    source: Checkpoint,
    options: RenderOptions,
    out: Path | None,
    *,
    untrained: PolicyArrays | None = None,
    show_output: bool = False,
    report_progress: Callable[[int, int], None] = lambda made, of: None,
) -> RenderResult:
    """Draw into a file, whole or not at all; without one, into a window."""
    check_options(options)
    mujoco = episodes.read_render_info(source.env).uses_mujoco
    drawing = render_subprocess.render_in_subprocess(
        make_job(source, options, untrained),
        mujoco=mujoco,
        show_output=show_output,
        report_progress=report_progress,
    )
    if out is not None:
        safetensors_file.write_atomically(out, drawing.data)
    return drawing
