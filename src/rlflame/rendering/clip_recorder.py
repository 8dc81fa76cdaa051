"""A recorder that has films made of a policy that is still learning, where any are wanted.

Must not know: how a film is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rlflame.rollout.spec import Fragment, PolicyArrays
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.evaluation import EvaluationRecord
from rlflame.training.trainer import Progress, Recorder, Snapshot


class ClipMaker(Protocol):
    """Where films are made while a run goes on."""

    def offer(self, progress: Progress, policy: Callable[[], PolicyArrays]) -> None:
        """Film this policy, as soon as nothing else is being filmed."""

    def is_busy(self) -> bool:
        """Whether a film is being made."""

    def take_notes(self) -> list[str]:
        """What there is to say since the last time."""

    def close(self, hurry: Callable[[], bool]) -> None:
        """Wait for what is being filmed, or end it where there is no time."""


class NullClipMaker:
    """Nobody wants films."""

    def offer(self, progress: Progress, policy: Callable[[], PolicyArrays]) -> None: ...

    def is_busy(self) -> bool:
        return False

    def take_notes(self) -> list[str]:
        return []

    def close(self, hurry: Callable[[], bool]) -> None: ...


def make_clip_recorder(
    recorder: Recorder,
    folder: Path,
    source: Checkpoint,
    every_steps: int | None,
    note: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> ClipRecorder:
    """The recorder, and films in that folder if any are wanted.

    `check` raises where the folder must not be written into any more.
    """
    if every_steps is None:
        return ClipRecorder(recorder, NullClipMaker(), 1, note)
    from rlflame.rendering.clips import (
        BackgroundClipMaker,  # and all that draws, which takes long to load
    )

    return ClipRecorder(
        recorder, BackgroundClipMaker(folder, source, check=check), every_steps, note
    )


class ClipRecorder:
    """A Recorder that also films the policy, every so many steps."""

    def __init__(
        self, recorder: Recorder, clips: ClipMaker, every_steps: int, note: Callable[[str], None]
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
        every, last = self._every_steps, self._last_clip_steps
        if last is None or progress.steps // every > last // every:
            self._last_clip_steps = progress.steps
            self._clips.offer(progress, lambda: take().policy)

    def time_phase(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.time_phase(name)

    def report_notes(self) -> None:
        """Notes are said here, by the thread that says everything else."""
        for text in self._clips.take_notes():
            self._note(text)

    def close(self, hurry: Callable[[], bool]) -> None:
        if self._clips.is_busy() and not hurry():
            self._note("The last film is being drawn; Ctrl-C goes without it.")
        self._clips.close(hurry)
        self.report_notes()
