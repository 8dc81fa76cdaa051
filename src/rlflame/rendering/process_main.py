"""The process that draws one job, or tries one of MuJoCo's renderers.

MuJoCo reads once, from the environment, how it is to draw, and graphics drivers crash.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Mapping
from typing import Any

from rlflame.errors import RlflameError
from rlflame.rollout.envs import user_code
from rlflame.rollout.process.channel import MessageKind
from rlflame.rollout.process.parent_channel import ParentChannel


def main() -> None:
    """`python -m rlflame.rendering.process_main ANSWERS PARENT`.

    An order without a job is a trial of the renderer. It is answered by the exit code, and
    precedes every job that uses MuJoCo.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = ParentChannel.open()
    order = channel.receive_order()
    channel.start_listening()
    if order is None or order["uses_mujoco"]:
        probe_renderer()
    if order is not None:
        channel.send(*run_job(order, channel))


def probe_renderer() -> None:
    """A context, and MuJoCo's own functions in it: a library may load and yet not draw."""
    import mujoco

    from rlflame.rollout.envs import make  # noqa: F401  defers what is loaded with MuJoCo

    context = mujoco.GLContext(64, 64)
    context.make_current()
    model = mujoco.MjModel.from_xml_string("<mujoco/>")
    mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
    context.free()


def run_job(order: Mapping[str, Any], channel: ParentChannel) -> tuple[MessageKind, Any]:
    """The drawing, or the error that ends it."""
    from rlflame.rendering.job import RenderError, RenderJob

    def report_progress(count: int, of: int) -> None:
        channel.send(MessageKind.BEAT, {"made": count, "of": of})

    job = RenderJob.from_dict(order)
    os.nice(job.nice)
    try:
        report_progress(0, job.options.episodes)
        user_code.load_from_environment()
        from rlflame.rendering import film

        drawing = film.Film(job).draw(report_progress)
    except RlflameError as error:
        return MessageKind.FAILURE, error.as_dict()
    except MemoryError:
        message = "There is not enough memory for the whole drawing."
        hint = "a smaller --width, fewer --episodes, or a lower --fps"
        return MessageKind.FAILURE, RenderError(message, hint).as_dict()
    except BaseException:  # an answer all the same
        return MessageKind.BROKEN, {"traceback": traceback.format_exc()}
    return MessageKind.RESULT, drawing.as_dict()


if __name__ == "__main__":
    main()
