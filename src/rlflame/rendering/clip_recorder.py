"""Short films of a policy that is still learning, made beside the run and never in its way.

The training loop only hands over a copy of the weights; a thread waits for the process that draws.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.errors import RlflameError
from rlflame.rendering.job import RenderJob, RenderOptions, RenderResult
from rlflame.rollout.task import Fragment, PolicyArrays
from rlflame.storage import safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.terminal_text import format_count
from rlflame.training.evaluation import EvaluationRecord
from rlflame.training.trainer import Progress, Recorder, Snapshot

_SECONDS = 10.0
_WIDTH = 240
_FPS = 12.5
_MOST_BYTES = 1_000_000
_NICE = 10
#: How long the end of a run waits for its last film.
CLOSE_TIMEOUT_S = 60.0
_POLL_S = 0.1
#: How long a film that is no longer wanted has to end.
_STOP_TIMEOUT_S = 2.0

#: Draws a job; ends early when the callable returns true.
RenderCallback = Callable[[RenderJob, bool, Callable[[], bool]], RenderResult]


def render_job(job: RenderJob, mujoco: bool, is_stopped: Callable[[], bool]) -> RenderResult:
    from rlflame.rendering import policy_render

    return policy_render.render_in_subprocess(job, mujoco=mujoco, is_stopped=is_stopped)


class BackgroundClipMaker:
    """Makes one film at a time. Of the policies that wait, the newest is filmed."""

    def __init__(
        self,
        folder: Path,
        source: Checkpoint,
        render: RenderCallback = render_job,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises where the folder must not be written into any more."""
        from rlflame.rendering import episodes  # loads Gymnasium

        self._folder = folder
        self._check = check
        self._source = source
        self._render = render
        self._lock = threading.Lock()
        self._pending: tuple[int, RenderJob] | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._has_skipped = self._failed = False
        self._due_count = self._rendered_count = 0
        self._notes: list[str] = []
        self._render_info: episodes.RenderInfo | None = None
        try:
            self._render_info = episodes.read_render_info(source.env)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def offer(self, progress: Progress, policy: Callable[[], PolicyArrays]) -> None:
        """Film this policy as soon as no other film is being made."""
        self._due_count += 1
        if self._render_info is None or self._stopped:
            return
        from rlflame.rendering import policy_render

        # The learner goes on changing the arrays that it has handed out.
        arrays = {name: np.array(array) for name, array in policy().items()}
        source = replace(self._source, policy=arrays, progress=progress)
        seed = self._source.recipe.evaluation.seed
        job = policy_render.make_job(source, RenderOptions("gif", seed, width=_WIDTH, fps=_FPS))
        limit = min(job.max_episode_steps, round(_SECONDS * self._render_info.steps_per_s))
        job = replace(job, max_episode_steps=limit, max_bytes=_MOST_BYTES, nice=_NICE)
        with self._lock:
            if self._pending is not None and not self._has_skipped:
                self._has_skipped = True
                self._notes.append("Films fall due faster than they are drawn: some are left out.")
            self._pending = (progress.steps, job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="clips")
                self._thread.start()

    def is_busy(self) -> bool:
        """Whether a film is being made."""
        return self._thread is not None

    def take_notes(self) -> list[str]:
        """Notes for the user since the last call."""
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    def close(self, hurry: Callable[[], bool], timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait for the film that is being made, or end it where there is no time."""
        deadline = time.monotonic() + timeout_s
        while (thread := self._thread) is not None:
            if hurry() or time.monotonic() > deadline:
                self._stopped = True
                thread.join(_STOP_TIMEOUT_S)
                break
            thread.join(_POLL_S)
        with self._lock:
            # A run that cannot be filmed at all has its note already.
            if self._due_count and (self._rendered_count or not self._failed):
                self._notes.append(self._format_summary())

    def _format_summary(self) -> str:
        some = f"{self._rendered_count} of " if self._rendered_count < self._due_count else ""
        advice = " A larger --video-every leaves none out." if self._has_skipped else ""
        return f"{some}{format_count(self._due_count, 'film')} drawn: {self._folder}.{advice}"

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._pending is None or self._stopped:
                    self._thread = None
                    return
                (steps, job), self._pending = self._pending, None
            self._render_clip(steps, job)

    def _render_clip(self, steps: int, job: RenderJob) -> None:
        assert self._render_info is not None
        try:
            drawing = self._render(job, self._render_info.uses_mujoco, lambda: self._stopped)
            self._check()
            self._folder.mkdir(exist_ok=True)
            safetensors_file.write_atomically(self._folder / f"step-{steps:09d}.gif", drawing.data)
            self._rendered_count += 1
        except RlflameError as error:
            if not self._stopped:
                self._give_up(f"{error.message} {error.hint}".rstrip())
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        self._stopped = self._failed = True
        more = "more " if self._rendered_count else ""
        with self._lock:
            self._notes.append(f"There will be no {more}films of this run: {reason}")


class ClipRecorder:
    """A Recorder that also films the policy every `every_steps` steps, where films are wanted."""

    def __init__(
        self,
        recorder: Recorder,
        clips: BackgroundClipMaker | None,
        every_steps: int,
        note: Callable[[str], None],
    ) -> None:
        self._recorder = recorder
        self._clips = clips
        self._every_steps = every_steps
        self._note = note
        self._last_clip_steps: int | None = None

    def record_iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        self._recorder.record_iteration(progress, metrics, fragments)
        self.report_notes()

    def record_evaluation(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> None:
        self._recorder.record_evaluation(progress, record, policy)

    def record_snapshot(
        self, take: Callable[[], Snapshot], progress: Progress, final: bool
    ) -> None:
        self._recorder.record_snapshot(take, progress, final)
        if self._clips is None:
            return
        every, last = self._every_steps, self._last_clip_steps
        if last is None or progress.steps // every > last // every:
            self._last_clip_steps = progress.steps
            self._clips.offer(progress, lambda: take().policy)

    def time_phase(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.time_phase(name)

    def report_notes(self) -> None:
        """Show notes in this thread, which shows everything else too."""
        for text in self._clips.take_notes() if self._clips else ():
            self._note(text)

    def close(self, hurry: Callable[[], bool]) -> None:
        if self._clips is None:
            return
        if self._clips.is_busy() and not hurry():
            self._note("The last film is being drawn; Ctrl-C goes without it.")
        self._clips.close(hurry)
        self.report_notes()
