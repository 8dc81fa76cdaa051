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


class Studio(Protocol):
    """Where films are made while a run goes on."""

    def offer(self, progress: Progress, policy: Callable[[], PolicyArrays]) -> None:
        """Film this policy, as soon as nothing else is being filmed."""

    def busy(self) -> bool:
        """Whether a film is being made."""

    def notes(self) -> list[str]:
        """What there is to say since the last time."""

    def close(self, hurry: Callable[[], bool]) -> None:
        """Wait for what is being filmed, or end it where there is no time."""


class NoClips:
    """Nobody wants films."""

    def offer(self, progress: Progress, policy: Callable[[], PolicyArrays]) -> None: ...

    def busy(self) -> bool:
        return False

    def notes(self) -> list[str]:
        return []

    def close(self, hurry: Callable[[], bool]) -> None: ...


def filmed(
    recorder: Recorder,
    folder: Path,
    source: Checkpoint,
    every_steps: int | None,
    note: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> FilmingRecorder:
    """The recorder, and films in that folder if any are wanted.

    `check` raises where the folder must not be written into any more.
    """
    if every_steps is None:
        return FilmingRecorder(recorder, NoClips(), 1, note)
    from rlflame.rendering.clips import Clips  # and all that draws, which takes long to load

    return FilmingRecorder(recorder, Clips(folder, source, check=check), every_steps, note)


class FilmingRecorder:
    """A Recorder that also films the policy, every so many steps."""

    def __init__(
        self, recorder: Recorder, clips: Studio, every_steps: int, note: Callable[[str], None]
    ) -> None:
        self._recorder = recorder
        self._clips = clips
        self._every_steps = every_steps
        self._note = note
        self._filmed: int | None = None

    def iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        self._recorder.iteration(progress, metrics, fragments)
        self.pass_on()

    def evaluation(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> None:
        self._recorder.evaluation(progress, record, policy)

    def snapshot(self, take: Callable[[], Snapshot], progress: Progress, final: bool) -> None:
        self._recorder.snapshot(take, progress, final)
        every, last = self._every_steps, self._filmed
        if last is None or progress.steps // every > last // every:
            self._filmed = progress.steps
            self._clips.offer(progress, lambda: take().policy)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.phase(name)

    def pass_on(self) -> None:
        """Notes are said here, by the thread that says everything else."""
        for text in self._clips.notes():
            self._note(text)

    def close(self, hurry: Callable[[], bool]) -> None:
        if self._clips.busy() and not hurry():
            self._note("The last film is being drawn; Ctrl-C goes without it.")
        self._clips.close(hurry)
        self.pass_on()
