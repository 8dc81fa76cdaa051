"""A policy's file turned into a picture or a film. Must not know: the command line, pixels."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlflame.errors import CheckpointError, ConfigError, ending, shell
from rlflame.rendering import client, episodes
from rlflame.rendering.job import KINDS, Drawing, Job, Kind
from rlflame.rollout.spec import PolicyArrays
from rlflame.storage import safetensors_file
from rlflame.storage.checkpoint import Checkpoint

#: What a GIF may weigh before it loses colours and frames.
MOST_GIF_BYTES = 5_000_000


@dataclass(frozen=True, slots=True)
class Wish:
    """What a user wants to see."""

    kind: Kind
    seed: int = 0
    episodes: int = 1
    best_of: int | None = None
    versus_untrained: bool = False
    width: int | None = None
    height: int | None = None
    fps: float | None = None


def kind_of(out: Path) -> Kind:
    """The kind of a file by its name, and whether it can be written where it is to be."""
    kind = KINDS.get(out.suffix.lower())
    if kind is None:
        raise ConfigError(
            f"-o {str(out)!r} ends neither .gif nor .mp4 nor .png.",
            shell("-o", ending(out, ".gif", "film")),
        )
    if kind == "mp4":
        from rlflame.rendering import encoders  # needs Pillow, which takes long to load

        encoders.check_video()
    if out.is_dir():
        raise CheckpointError(f"{out} is a folder.", "-o with the name of a file")
    folder = out.absolute().parent
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder.", shell("mkdir", "-p", folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} cannot be written.", "-o in another folder")
    return kind


def check(wish: Wish) -> None:
    """What cannot be meant, before anything is played."""
    if wish.best_of is not None and wish.best_of < wish.episodes:
        raise ConfigError(
            f"--best-of {wish.best_of} is fewer than --episodes {wish.episodes}.",
            f"--best-of {wish.episodes * 10}",
        )
    if wish.kind == "window" and wish.versus_untrained:
        raise ConfigError("--human shows one policy.", "-o film.gif --vs-untrained")
    if wish.kind == "gif" and wish.fps is not None:
        from rlflame.rendering import encoders

        encoders.check_gif_rate(wish.fps)


def job_of(source: Checkpoint, wish: Wish, untrained: PolicyArrays | None = None) -> Job:
    """The drawing that a wish means for a policy: the episodes that `eval` scores."""
    captions, policies = [caption_of(source)], [source.policy]
    if untrained is not None:
        captions.insert(0, "untrained")
        policies.insert(0, untrained)
    return Job(
        env=source.env,
        policy=source.policy_spec,
        captions=tuple(captions),
        policies=tuple(policies),
        kind=wish.kind,
        seed=wish.seed,
        episodes=wish.episodes,
        best_of=wish.best_of or wish.episodes,
        max_episode_steps=source.recipe.evaluation.max_episode_steps,
        width=wish.width,
        height=wish.height,
        fps=wish.fps,
        # Whoever names a rate gets that rate.
        max_bytes=MOST_GIF_BYTES if wish.fps is None else None,
    )


def caption_of(source: Checkpoint) -> str:
    return f"{source.recipe.learning.algorithm.upper()}, step {source.progress.steps:,}"


def render(
    source: Checkpoint,
    wish: Wish,
    out: Path | None,
    *,
    untrained: PolicyArrays | None = None,
    show_output: bool = False,
    tell: Callable[[int, int], None] = lambda made, of: None,
) -> Drawing:
    """Draw into a file, whole or not at all; without one, into a window."""
    check(wish)
    mujoco = episodes.looks(source.env).mujoco
    drawing = client.drawn(
        job_of(source, wish, untrained), mujoco=mujoco, show_output=show_output, tell=tell
    )
    if out is not None:
        safetensors_file.write_atomically(out, drawing.data)
    return drawing
