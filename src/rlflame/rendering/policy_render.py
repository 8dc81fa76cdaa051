"""Renders a policy as an image or a video, in a process with working graphics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rlflame.errors import (
    CheckpointError,
    ConfigError,
    RlflameError,
    check_extra,
    format_shell,
    make_error,
    replace_suffix,
)
from rlflame.rendering import episodes, gl_backend
from rlflame.rendering.image_window import has_display
from rlflame.rendering.job import RenderError, RenderJob, RenderKind, RenderOptions, RenderResult
from rlflame.rollout import blas
from rlflame.rollout.process.channel import MessageKind, ProtocolError
from rlflame.rollout.process.worker_process import WorkerProcess
from rlflame.rollout.task import PolicyArrays
from rlflame.storage import safetensors_file
from rlflame.storage.checkpoint import Checkpoint

KIND_BY_SUFFIX: dict[str, RenderKind] = {".gif": "gif", ".mp4": "mp4", ".png": "png"}
ProgressCallback = Callable[[str], None]
#: The maximum size of a GIF. A larger one is encoded with fewer colours and frames.
MAX_GIF_BYTES = 5_000_000
#: At a higher frame rate, viewers play GIFs much too slowly.
MAX_GIF_FPS = 50.0
#: The interval between checks for a cancellation.
_POLL_S = 0.2


def resolve_kind(out: Path) -> RenderKind:
    """Return the kind of an output file by its suffix; check that it can be written."""
    kind = KIND_BY_SUFFIX.get(out.suffix.lower())
    if kind is None:
        raise ConfigError(
            f"-o {str(out)!r} does not end in .gif, .mp4 or .png.",
            format_shell("-o", replace_suffix(out, ".gif", "video")),
        )
    if kind == "mp4":
        check_extra("imageio_ffmpeg", "no .mp4 can be written", "video")
    if out.is_dir() or not os.access(out.absolute().parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{out} cannot be written.", "choose a file in a writable folder")
    return kind


def check_options(options: RenderOptions) -> None:
    """Raise ConfigError for options that cannot be combined, before any episode runs."""
    if options.candidates < options.episodes:
        raise ConfigError(
            f"--best-of {options.best_of} is less than --episodes {options.episodes}.",
            f"--best-of {options.episodes * 10}",
        )
    if options.kind == "window" and options.versus_untrained:
        raise ConfigError("--human shows only one policy.", "-o video.gif --vs-untrained")
    if options.kind == "gif" and (options.fps or 0.0) > MAX_GIF_FPS:
        raise ConfigError(
            f"--fps {options.fps:g} is too fast for GIF viewers.",
            "--fps 50, or an .mp4 file with -o",
        )


def make_job(
    source: Checkpoint,
    options: RenderOptions,
    info: episodes.RenderInfo,
    initial_policy: PolicyArrays | None = None,
) -> RenderJob:
    """Make a job that renders a policy in the same episodes as `rlflame eval`."""
    caption = f"{source.recipe.learning.algorithm.upper()}, step {source.progress.steps:,}"
    return RenderJob(
        env=source.env,
        policy=source.policy_spec,
        captions=(caption,) if initial_policy is None else ("untrained", caption),
        policies=(source.policy,) if initial_policy is None else (initial_policy, source.policy),
        options=options,
        max_episode_steps=source.recipe.evaluation.max_episode_steps,
        uses_mujoco=info.uses_mujoco,
        # An explicit rate has priority over the file size.
        max_bytes=MAX_GIF_BYTES if options.fps is None else None,
    )


def render(
    source: Checkpoint,
    options: RenderOptions,
    out: Path | None,
    *,
    initial_policy: PolicyArrays | None = None,
    show_output: bool = False,
    report_progress: ProgressCallback = lambda text: None,
) -> RenderResult:
    """Render to a file, which is written atomically, or to a window if `out` is None."""
    check_options(options)
    job = make_job(source, options, episodes.read_render_info(source.env), initial_policy)
    drawing = render_in_subprocess(job, show_output=show_output, report_progress=report_progress)
    if out is not None:
        safetensors_file.write_atomically(out, drawing.data)
    return drawing


def render_in_subprocess(
    job: RenderJob,
    *,
    show_output: bool = False,
    report_progress: ProgressCallback = lambda text: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> RenderResult:
    """Render a job; if it needs MuJoCo's graphics, use the first renderer that works."""
    run_job = partial(_run_job, job, show_output, report_progress, is_stopped)
    # With these drivers, pygame draws into memory and needs no display.
    variables = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}
    backends = gl_backend.list_backends()
    if job.options.kind == "window":
        check_display(os.environ)
        variables, backends = {}, ["glfw"]
    if not job.uses_mujoco:
        return run_job(variables)
    reasons = []
    for backend in backends:
        try:
            drawing = run_job({**variables, **gl_backend.make_backend_variables(backend)})
        except gl_backend.GraphicsUnavailableError as error:
            reasons.append(f"{backend}: {error}")
            continue
        gl_backend.store_backend(backend)
        return drawing
    raise gl_backend.GraphicsUnavailableError(
        f"MuJoCo cannot render on this machine: {'; '.join(reasons)}.",
        gl_backend.find_install_command(),
    )


def check_display(environment: Mapping[str, str]) -> None:
    """Raise an error if there is no display for a window."""
    if not has_display(environment):
        raise RenderError(
            "There is no display here, so no window can be opened (DISPLAY and WAYLAND_DISPLAY "
            "are not set).",
            "-o video.gif instead of --human",
        )


def _run_job(
    job: RenderJob,
    show_output: bool,
    report_progress: ProgressCallback,
    is_stopped: Callable[[], bool],
    variables: Mapping[str, str],
) -> RenderResult:
    process = WorkerProcess(
        module=gl_backend.CHILD_MODULE,
        show_output=show_output,
        environment={**blas.make_child_environment(), **variables},
    )
    progress_text = "starting the renderer"
    has_graphics, deadline = not job.uses_mujoco, time.monotonic() + gl_backend.PROBE_TIMEOUT_S
    try:
        process.channel.send(MessageKind.ORDER, job.as_dict())
        while not is_stopped():
            # Report again while the process is silent, so that a log shows that it is alive.
            report_progress(progress_text)
            try:
                message = process.channel.receive(_POLL_S)
                kind, value = message.kind, message.value
            except TimeoutError:
                if has_graphics or time.monotonic() < deadline:
                    continue
                raise gl_backend.GraphicsUnavailableError("no answer") from None
            except (EOFError, ProtocolError) as error:
                raise _make_loss_error(process, error, has_graphics) from error
            has_graphics = True
            if kind is MessageKind.BEAT:
                progress_text = value["text"]
            elif kind is MessageKind.RESULT:
                return RenderResult.from_dict(value)
            elif kind is MessageKind.FAILURE:
                raise make_error(value)
            else:
                raise RenderError(
                    "The rendering process failed.", "this is a bug in rlflame", value["traceback"]
                )
        raise RenderError("The rendering was cancelled.")
    finally:
        process.terminate()


def _make_loss_error(
    process: WorkerProcess, error: EOFError | ProtocolError, has_graphics: bool
) -> RlflameError:
    ending, output = process.explain_loss(error), process.read_output()
    if not has_graphics:
        lines = output.strip().splitlines()
        return gl_backend.GraphicsUnavailableError(lines[-1][:200] if lines else ending)
    return RenderError(
        f"The rendering process produced no image: {ending}.",
        "rlflame cluster-check shows the working renderers; --debug shows all output",
        output,
    )
