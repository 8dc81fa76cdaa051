"""The process that renders a job, or tries one of MuJoCo's renderers.

A separate process is needed because MuJoCo reads its environment variable only once, and because
graphics drivers can crash.
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
    """Run `python -m rlflame.rendering.process_main ANSWERS PARENT`.

    ANSWERS is the file descriptor for the answers, and PARENT is the process ID of the parent.
    Without a job, only the renderer is tried, and the exit code is the answer. The same trial
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
    """Use MuJoCo in a new context, because a library may load but fail to draw."""
    import mujoco

    from rlflame.rollout.envs import make  # noqa: F401  defers glfw and imageio

    context = mujoco.GLContext(64, 64)
    context.make_current()
    model = mujoco.MjModel.from_xml_string("<mujoco/>")
    mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
    context.free()


def run_job(order: Mapping[str, Any], channel: ParentChannel) -> tuple[MessageKind, Any]:
    """Render the job; return the kind and the value of the answer."""
    from rlflame.rendering.job import RenderError, RenderJob

    def report_progress(text: str) -> None:
        channel.send(MessageKind.BEAT, {"text": text})

    job = RenderJob.from_dict(order)
    os.nice(job.nice)
    try:
        report_progress("making the environment")
        user_code.load_from_environment()
        from rlflame.rendering import video

        drawing = video.Video(job).draw(report_progress)
    except RlflameError as error:
        return MessageKind.FAILURE, error.as_dict()
    except MemoryError:
        message = "There is not enough memory for all images."
        hint = "use a smaller --width, fewer --episodes or a lower --fps"
        return MessageKind.FAILURE, RenderError(message, hint).as_dict()
    except BaseException:  # the error is the answer
        return MessageKind.BROKEN, {"traceback": traceback.format_exc()}
    return MessageKind.RESULT, drawing.as_dict()


if __name__ == "__main__":
    main()
