"""The process that draws: one job in, one drawing out, in the frames of `rollout.child`.

A process of its own because MuJoCo reads from the environment, once, how it is to draw, and
because graphics drivers crash. Ends when its parent's pipe closes. Must not know: checkpoints,
renderers, who asks.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from typing import Any, BinaryIO

from rlflame.errors import RlflameError
from rlflame.rollout import wire
from rlflame.rollout.envs import user_code
from rlflame.rollout.process.worker_main import (
    HEADER,
    FrameKind,
    kill_group_with_process,
    open_pipes,
    read_frame,
)


def main() -> None:
    """`python -m rlflame.rendering.process_main ANSWERS`, where ANSWERS is an open descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = open_pipes()
    kill_group_with_process()
    frame = read_frame(requests)
    if frame is None:
        return
    threading.Thread(target=_watch, args=(requests,), daemon=True).start()
    with os.fdopen(answers, "wb") as out:
        kind, answer = _make_answer(frame[1], out)
        _send(out, kind, answer)


def _make_answer(payload: bytes, out: BinaryIO) -> tuple[FrameKind, dict[str, Any]]:
    """The drawing; what went wrong in words; or where in this process it went wrong."""
    from rlflame.rendering.job import RenderError, RenderJob

    job = RenderJob.from_dict(wire.decode(payload))
    os.nice(job.nice)
    try:
        user_code.load_from_environment()
        from rlflame.rendering import film

        drawing = film.draw(
            job, lambda made, of: _send(out, FrameKind.BEAT, {"made": made, "of": of})
        )
    except RlflameError as error:
        return FrameKind.RESULT, _describe_error(error)
    except MemoryError:
        return FrameKind.RESULT, _describe_error(
            RenderError(
                "There is not enough memory for the whole drawing.",
                "a smaller --width, fewer --episodes, or a lower --fps",
            )
        )
    except BaseException:  # an answer all the same
        return FrameKind.BROKEN, {"traceback": traceback.format_exc()}
    return FrameKind.RESULT, {"drawing": drawing.as_dict()}


def _describe_error(error: RlflameError) -> dict[str, Any]:
    fields = {"message": error.message, "hint": error.hint, "detail": error.detail}
    return {"error": {**fields, "exit_code": error.exit_code}}


def _send(out: BinaryIO, kind: FrameKind, value: dict[str, Any]) -> None:
    payload = wire.encode(value)
    out.write(HEADER.pack(kind, len(payload)) + payload)
    out.flush()


def _watch(requests: BinaryIO) -> None:
    """A parent that is gone wants no drawing; what environments have started goes too."""
    while read_frame(requests) is not None:
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
