"""A drawing ordered from the process that draws, with the graphics that work on this machine.

Must not know: how anything is drawn, checkpoints, the command line.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlflame.errors import RlflameError
from rlflame.rendering import gl_backend
from rlflame.rendering.job import RenderError, RenderJob, RenderResult
from rlflame.rollout import blas, wire
from rlflame.rollout.process.worker_main import FrameKind
from rlflame.rollout.process.worker_process import ProtocolError, WorkerProcess, describe_exit

ProgressCallback = Callable[[int, int], None]
_MODULE = "rlflame.rendering.process_main"
#: How often it is asked whether anybody still wants the drawing.
_POLL_S = 0.2


def render_in_subprocess(
    job: RenderJob,
    *,
    mujoco: bool,
    finder: gl_backend.BackendFinder | None = None,
    show_output: bool = False,
    report_progress: ProgressCallback = lambda made, of: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> RenderResult:
    """The drawing of a job. `mujoco`: whether it needs one of MuJoCo's renderers."""
    run_job = partial(
        _run_job,
        job,
        show_output=show_output,
        report_progress=report_progress,
        is_stopped=is_stopped,
    )
    if job.kind == "window":
        check_display(os.environ)
        return run_job({gl_backend.VARIABLE: "glfw"} if mujoco else {})
    # pygame draws into memory wherever it thinks that there is no screen.
    quiet = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}
    if not mujoco:
        return run_job(quiet)
    finder = finder or gl_backend.BackendFinder()
    backend = finder.find()
    try:
        return run_job({**quiet, **gl_backend.make_backend_variables(backend)})
    except RlflameError:
        if not finder.is_cached:
            raise
        # What worked once may not any more: the machine has changed, or its driver.
        finder.forget()
        other_backend = finder.find()
        if other_backend == backend:
            raise
    return run_job({**quiet, **gl_backend.make_backend_variables(other_backend)})


def check_display(environment: Mapping[str, str]) -> None:
    """A window needs a screen; better said before anything is played."""
    has_display = any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if sys.platform != "darwin" and not has_display:
        raise RenderError(
            "There is no display here, so no window can be opened (DISPLAY and WAYLAND_DISPLAY "
            "are not set).",
            "-o film.gif instead of --human",
        )


def _run_job(
    job: RenderJob,
    variables: Mapping[str, str],
    *,
    show_output: bool,
    report_progress: ProgressCallback,
    is_stopped: Callable[[], bool],
) -> RenderResult:
    process = WorkerProcess(
        module=_MODULE,
        show_output=show_output,
        environment={**blas.make_child_environment(), **variables},
    )
    try:
        process.send(FrameKind.TASK, wire.encode(job.as_dict()))
        while not is_stopped():
            waiting = [process.requests] if process.has_backlog else []
            select.select([process.answers], waiting, [], _POLL_S)
            process.flush()
            for kind, payload in _receive_frames(process):
                answer = wire.decode(payload)
                if kind is FrameKind.BEAT:
                    report_progress(answer["made"], answer["of"])
                else:
                    return _read_answer(answer)
        raise RenderError("The drawing was cut short.")
    finally:
        process.terminate()


def _receive_frames(process: WorkerProcess) -> list[tuple[FrameKind, bytes]]:
    try:
        return process.receive()
    except BlockingIOError:
        return []
    except (EOFError, ProtocolError) as error:
        ending = describe_exit(process.terminate(grace_s=1.0))
        raise RenderError(
            f"The process that draws has {_format_ending(ending)} without a picture.",
            "rlflame cluster-check shows which graphics work here; --debug what was printed",
            process.read_output(),
        ) from error


def _format_ending(ending: str) -> str:
    return f"been {ending}" if ending.startswith("killed") else ending


def _read_answer(answer: Mapping[str, Any]) -> RenderResult:
    if "error" in answer:
        fields = answer["error"]
        error = RlflameError(fields["message"], fields["hint"], fields["detail"])
        error.exit_code = fields["exit_code"]
        raise error
    if "traceback" in answer:
        raise RenderError(
            "The process that draws went wrong.", "this is a bug", answer["traceback"]
        )
    return RenderResult.from_dict(answer["drawing"])
