"""Records short video clips of the policy without delaying its training.

The training loop only copies the weights. A thread waits for the rendering process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflame.errors import RlflameError
from rlflame.rendering.job import RenderJob, RenderOptions, RenderResult
from rlflame.rollout.task import Fragment, PolicyArrays
from rlflame.storage import safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.terminal_text import format_count
from rlflame.training.evaluation import EvaluationRecord
from rlflame.training.trainer import Progress, Recorder, Snapshot

if TYPE_CHECKING:
    from rlflame.rendering.episodes import RenderInfo

_SECONDS = 10.0
_WIDTH = 240
_FPS = 12.5
_MOST_BYTES = 1_000_000
_NICE = 10
#: The maximum time that the end of a run waits for its last clip.
CLOSE_TIMEOUT_S = 60.0
_POLL_S = 0.1
#: The time allowed for a cancelled clip to end.
_STOP_TIMEOUT_S = 2.0


def render_job(job: RenderJob, is_stopped: Callable[[], bool]) -> RenderResult:
    """Render a job; cancel it when `is_stopped` returns True."""
    from rlflame.rendering import policy_render

    return policy_render.render_in_subprocess(job, is_stopped=is_stopped)


class ClipRecorder:
    """A recorder that also makes a clip every `every_steps` steps (never if 0).

    Only one clip is made at a time. If several policies wait, only the latest gets a clip.
    """

    def __init__(
        self,
        recorder: Recorder,
        folder: Path,
        source: Checkpoint,
        every_steps: int,
        note: Callable[[str], None],
        *,
        check: Callable[[], None] = lambda: None,
        render: Callable[[RenderJob, Callable[[], bool]], RenderResult] = render_job,
    ) -> None:
        """`check` raises an error if the folder must no longer be written to."""
        self._recorder = recorder
        self._folder = folder
        self._source = source
        self._every_steps = every_steps
        self._note = note
        self._check = check
        self._render = render
        self._info: RenderInfo | None = None
        self._last_clip_steps: int | None = None
        self._lock = threading.Lock()
        self._pending: tuple[int, RenderJob] | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._due_count = self._rendered_count = 0
        #: The reason why no more clips are made. The training thread shows it, like all notes.
        self._failure = ""

    def record_iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        self._recorder.record_iteration(progress, metrics, fragments)
        self._report_failure()

    def record_evaluation(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> None:
        self._recorder.record_evaluation(progress, record, policy)

    def record_snapshot(
        self, take: Callable[[], Snapshot], progress: Progress, final: bool
    ) -> None:
        self._recorder.record_snapshot(take, progress, final)
        interval, last = self._every_steps, self._last_clip_steps
        if interval and (last is None or progress.steps // interval > last // interval):
            self._last_clip_steps = progress.steps
            self._due_count += 1
            if not self._is_stopped:
                self._offer(progress, take().policy)

    def time_phase(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.time_phase(name)

    def is_busy(self) -> bool:
        """Return whether a clip is being made."""
        return self._thread is not None

    def close(self, hurry: Callable[[], bool]) -> None:
        """Wait for the clip; cancel it when `hurry()` is true or after CLOSE_TIMEOUT_S."""
        if self.is_busy() and not hurry():
            self._note("The last video is being rendered; press Ctrl-C to skip it.")
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while (thread := self._thread) is not None:
            if hurry() or time.monotonic() > deadline:
                self._is_stopped = True
                thread.join(_STOP_TIMEOUT_S)
                break
            thread.join(_POLL_S)
        self._report_failure()
        if self._due_count:
            videos = format_count(self._due_count, "video")
            self._note(f"{self._rendered_count} of {videos} rendered: {self._folder}.")

    def _offer(self, progress: Progress, policy: PolicyArrays) -> None:
        """Record this policy as soon as no other clip is being made."""
        from rlflame.rendering import episodes, policy_render  # imports Gymnasium

        # Copy the arrays, because the learner changes them in place.
        arrays = {name: np.array(array) for name, array in policy.items()}
        source = replace(self._source, policy=arrays, progress=progress)
        options = RenderOptions("gif", source.recipe.evaluation.seed, width=_WIDTH, fps=_FPS)
        try:
            self._info = self._info or episodes.read_render_info(source.env)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return
        job = policy_render.make_job(source, options, self._info)
        limit = min(job.max_episode_steps, round(_SECONDS * self._info.steps_per_s))
        job = replace(job, max_episode_steps=limit, max_bytes=_MOST_BYTES, nice=_NICE)
        with self._lock:
            self._pending = (progress.steps, job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="clips")
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._pending is None or self._is_stopped:
                    self._thread = None
                    return
                (steps, job), self._pending = self._pending, None
            try:
                drawing = self._render(job, lambda: self._is_stopped)
                self._check()
                self._folder.mkdir(exist_ok=True)
                path = self._folder / f"step-{steps:09d}.gif"
                safetensors_file.write_atomically(path, drawing.data)
                self._rendered_count += 1
            except RlflameError as error:
                if not self._is_stopped:
                    self._give_up(f"{error.message} {error.hint}".rstrip())
            except Exception as error:
                self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        self._failure, self._is_stopped = reason, True

    def _report_failure(self) -> None:
        if self._failure:
            self._note(f"No more videos of this run will be rendered: {self._failure}")
            self._failure = ""
