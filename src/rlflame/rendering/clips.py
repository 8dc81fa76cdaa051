"""Short films of a policy that is still learning, made beside the run and never in its way.

A thread waits for the process that draws; the loop only hands over a copy of the weights. What
goes wrong is one note, and so is what was left out. Must not know: how anything is drawn,
algorithms, the command line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlflame.errors import RlflameError
from rlflame.rendering import client, episodes, video
from rlflame.rendering.job import Drawing, Job
from rlflame.rollout.spec import PolicyArrays
from rlflame.storage import safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.text import format_count
from rlflame.training.trainer import Progress

_SECONDS = 10.0
_WIDTH = 240
_FPS = 12.5
_MOST_BYTES = 1_000_000
_NICE = 10
#: How long the end of a run waits for its last film.
PATIENCE_S = 60.0
_LOOK_S = 0.1
#: How long a film that is no longer wanted has to end.
_LEAVE_S = 2.0

#: A job drawn; it gives up when it is told to stop.
Draw = Callable[[Job, bool, Callable[[], bool]], Drawing]


def drawn(job: Job, mujoco: bool, stopped: Callable[[], bool]) -> Drawing:
    return client.drawn(job, mujoco=mujoco, stopped=stopped)


class Clips:
    """One film at a time; of those that wait, the newest counts."""

    def __init__(
        self,
        folder: Path,
        source: Checkpoint,
        draw: Draw = drawn,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._check = check
        self._source = source
        self._draw = draw
        self._lock = threading.Lock()
        self._waiting: tuple[int, Job] | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._behind = self._failed = False
        self._due = self._drawn = 0
        self._notes: list[str] = []
        self._look: episodes.Looks | None = None
        try:
            self._look = episodes.looks(source.env)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def offer(self, progress: Progress, policy: Callable[[], PolicyArrays]) -> None:
        self._due += 1
        if self._look is None or self._stopped:
            return
        # The learner goes on changing the arrays that it has handed out.
        kept = {name: np.array(array) for name, array in policy().items()}
        source = replace(self._source, policy=kept, progress=progress)
        wish = video.Wish("gif", self._source.recipe.evaluation.seed, width=_WIDTH, fps=_FPS)
        job = video.job_of(source, wish)
        limit = min(job.max_episode_steps, round(_SECONDS * self._look.steps_per_s))
        job = replace(job, max_episode_steps=limit, max_bytes=_MOST_BYTES, nice=_NICE)
        with self._lock:
            if self._waiting is not None and not self._behind:
                self._behind = True
                self._notes.append("Films fall due faster than they are drawn: some are left out.")
            self._waiting = (progress.steps, job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="clips")
                self._thread.start()

    def busy(self) -> bool:
        return self._thread is not None

    def notes(self) -> list[str]:
        with self._lock:
            found, self._notes = self._notes, []
        return found

    def close(self, hurry: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while (thread := self._thread) is not None:
            if hurry() or time.monotonic() > deadline:
                self._stopped = True
                thread.join(_LEAVE_S)
                break
            thread.join(_LOOK_S)
        with self._lock:
            # Of a run that cannot be filmed at all, that has been said.
            if self._due and (self._drawn or not self._failed):
                self._notes.append(self._summary())

    def _summary(self) -> str:
        some = f"{self._drawn} of " if self._drawn < self._due else ""
        advice = " A larger --video-every leaves none out." if self._behind else ""
        return f"{some}{format_count(self._due, 'film')} drawn: {self._folder}.{advice}"

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None or self._stopped:
                    self._thread = None
                    return
                (steps, job), self._waiting = self._waiting, None
            self._film(steps, job)

    def _film(self, steps: int, job: Job) -> None:
        assert self._look is not None
        try:
            drawing = self._draw(job, self._look.mujoco, lambda: self._stopped)
            self._check()
            self._folder.mkdir(exist_ok=True)
            safetensors_file.write_atomically(self._folder / f"step-{steps:09d}.gif", drawing.data)
            self._drawn += 1
        except RlflameError as error:
            if not self._stopped:
                self._give_up(f"{error.message} {error.hint}".rstrip())
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        self._stopped = self._failed = True
        more = "more " if self._drawn else ""
        with self._lock:
            self._notes.append(f"There will be no {more}films of this run: {reason}")
