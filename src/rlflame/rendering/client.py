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
from rlflame.rendering.job import Drawing, DrawingFailed, Job
from rlflame.rollout import blas, wire
from rlflame.rollout.process.worker_main import Kind
from rlflame.rollout.process.worker_process import Garbled, WorkerProcess, how_it_ended

Tell = Callable[[int, int], None]
_MODULE = "rlflame.rendering.process_main"
#: How often it is asked whether anybody still wants the drawing.
_LOOK_S = 0.2


def drawn(
    job: Job,
    *,
    mujoco: bool,
    finder: gl_backend.Finder | None = None,
    show_output: bool = False,
    tell: Tell = lambda made, of: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Drawing:
    """The drawing of a job. `mujoco`: whether it needs one of MuJoCo's renderers."""
    order = partial(_ordered, job, show_output=show_output, tell=tell, stopped=stopped)
    if job.kind == "window":
        check_display(os.environ)
        return order({gl_backend.VARIABLE: "glfw"} if mujoco else {})
    # pygame draws into memory wherever it thinks that there is no screen.
    quiet = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}
    if not mujoco:
        return order(quiet)
    finder = finder or gl_backend.Finder()
    backend = finder.find()
    try:
        return order({**quiet, **gl_backend.variables(backend)})
    except RlflameError:
        if not finder.remembered:
            raise
        # What worked once may not any more: the machine has changed, or its driver.
        finder.forget()
        found = finder.find()
        if found == backend:
            raise
    return order({**quiet, **gl_backend.variables(found)})


def check_display(environment: Mapping[str, str]) -> None:
    """A window needs a screen; better said before anything is played."""
    shown = any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if sys.platform != "darwin" and not shown:
        raise DrawingFailed(
            "There is no display here, so no window can be opened (DISPLAY and WAYLAND_DISPLAY "
            "are not set).",
            "-o film.gif instead of --human",
        )


def _ordered(
    job: Job,
    variables: Mapping[str, str],
    *,
    show_output: bool,
    tell: Tell,
    stopped: Callable[[], bool],
) -> Drawing:
    process = WorkerProcess(
        module=_MODULE,
        show_output=show_output,
        environment={**blas.child_environment(), **variables},
    )
    try:
        process.send(Kind.TASK, wire.encode(job.as_dict()))
        while not stopped():
            waiting = [process.requests] if process.backlog else []
            select.select([process.answers], waiting, [], _LOOK_S)
            process.flush()
            for kind, payload in _received(process):
                answer = wire.decode(payload)
                if kind is Kind.BEAT:
                    tell(answer["made"], answer["of"])
                else:
                    return _drawing(answer)
        raise DrawingFailed("The drawing was cut short.")
    finally:
        process.retire()


def _received(process: WorkerProcess) -> list[tuple[Kind, bytes]]:
    try:
        return process.receive()
    except BlockingIOError:
        return []
    except (EOFError, Garbled) as error:
        said = how_it_ended(process.retire(grace_s=1.0))
        raise DrawingFailed(
            f"The process that draws has {_ended(said)} without a picture.",
            "rlflame cluster-check shows which graphics work here; --debug what was printed",
            process.printed(),
        ) from error


def _ended(said: str) -> str:
    return f"been {said}" if said.startswith("killed") else said


def _drawing(answer: Mapping[str, Any]) -> Drawing:
    if "error" in answer:
        said = answer["error"]
        error = RlflameError(said["message"], said["hint"], said["detail"])
        error.exit_code = said["exit_code"]
        raise error
    if "traceback" in answer:
        raise DrawingFailed(
            "The process that draws went wrong.", "this is a bug", answer["traceback"]
        )
    return Drawing.from_dict(answer["drawing"])
