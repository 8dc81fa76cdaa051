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
from rlflame.rollout.envs import user_file
from rlflame.rollout.process.worker_main import (
    HEADER,
    Kind,
    end_group_with_process,
    pipes,
    read_frame,
)


def main() -> None:
    """`python -m rlflame.rendering.process_main ANSWERS`, where ANSWERS is an open descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = pipes()
    end_group_with_process()
    frame = read_frame(requests)
    if frame is None:
        return
    threading.Thread(target=_watch, args=(requests,), daemon=True).start()
    with os.fdopen(answers, "wb") as out:
        kind, answer = _answered(frame[1], out)
        _send(out, kind, answer)


def _answered(payload: bytes, out: BinaryIO) -> tuple[Kind, dict[str, Any]]:
    """The drawing; what went wrong in words; or where in this process it went wrong."""
    from rlflame.rendering.job import DrawingFailed, Job

    job = Job.from_dict(wire.decode(payload))
    os.nice(job.nice)
    try:
        user_file.load_told()
        from rlflame.rendering import film

        drawing = film.draw(job, lambda made, of: _send(out, Kind.BEAT, {"made": made, "of": of}))
    except RlflameError as error:
        return Kind.RESULT, _in_words(error)
    except MemoryError:
        return Kind.RESULT, _in_words(
            DrawingFailed(
                "There is not enough memory for the whole drawing.",
                "a smaller --width, fewer --episodes, or a lower --fps",
            )
        )
    except BaseException:  # an answer all the same
        return Kind.BROKEN, {"traceback": traceback.format_exc()}
    return Kind.RESULT, {"drawing": drawing.as_dict()}


def _in_words(error: RlflameError) -> dict[str, Any]:
    said = {"message": error.message, "hint": error.hint, "detail": error.detail}
    return {"error": {**said, "exit_code": error.exit_code}}


def _send(out: BinaryIO, kind: Kind, value: dict[str, Any]) -> None:
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
