"""A run on disk: its lock, its config, its logs and its checkpoints.

    config.toml          recipe and runtime
    metrics.jsonl        one line an iteration, one an evaluation; no wall clock
    episodes.csv         one line a training episode; no wall clock
    timing.jsonl         wall and processor seconds of each iteration, by phase
    checkpoints/         step-000100000.safetensors, the newest few
    latest.safetensors   the newest checkpoint
    best.safetensors     the policy with the best evaluation
    result.json          the final evaluation

Must not know: the loop, algorithms, display.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rlflame import checkpoint as files
from rlflame.checkpoint import Checkpoint
from rlflame.errors import CheckpointError
from rlflame.evaluate import EvaluationRecord
from rlflame.metrics import EPISODE_HEADER, JsonLines, LineFile
from rlflame.rollout.spec import Fragment, PolicyArrays
from rlflame.trainer import Progress, Snapshot

_STEP_FILE = re.compile(r"step-(\d{9,})\.safetensors")


class RunFolder:
    """The paths of a run and the exclusive right to write them."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, wanted: Path) -> RunFolder:
        """A new folder; where one exists already, a suffix is added and nothing is touched."""
        path = wanted
        for number in range(2, 10_000):
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                path = wanted.with_name(f"{wanted.name}-{number}")
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be made: {error.strerror}.", "choose another with --out"
                ) from error
        lock = _locked(path)
        with _writing(path):
            (path / "checkpoints").mkdir()
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        folder = cls(path, _locked(path))
        with contextlib.suppress(OSError):
            (path / "checkpoints").mkdir(exist_ok=True)
            for leftover in (*path.glob(".*.safetensors.*"), *path.glob("checkpoints/.step-*")):
                leftover.unlink()
        return folder

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def latest(self) -> Path:
        return self.path / "latest.safetensors"

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"


def step_files(folder: Path) -> list[Path]:
    """Checkpoints in a run folder, oldest first."""
    found = folder.glob("checkpoints/step-*.safetensors")
    return sorted(
        (path for path in found if _STEP_FILE.fullmatch(path.name)),
        key=lambda path: int(path.name[5:-12]),
    )


def newest_checkpoint(target: Path, note: Callable[[str], None]) -> Checkpoint:
    """The newest valid checkpoint of a run folder, or the one in the file that is named."""
    if not target.is_dir():
        return files.load(target)
    latest = target / "latest.safetensors"
    candidates = [latest, *reversed(step_files(target))]
    first: CheckpointError | None = None
    for path in candidates:
        if not path.exists():
            continue
        try:
            found = files.load(path)
        except CheckpointError as error:
            first = first or error
            note(f"{error.message} Trying an earlier checkpoint.")
            continue
        return found
    if first is not None:
        raise first
    raise CheckpointError(
        f"{target} holds no checkpoint.", "rlflame runs lists the runs that can be resumed"
    )


class Watcher(Protocol):
    """Whoever shows a run to people or programs."""

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None: ...

    def evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None: ...

    def saved(self, path: Path, progress: Progress) -> None: ...


class FileRecorder:
    """Writes a run's record and its checkpoints; the trainer's Recorder."""

    def __init__(
        self,
        folder: RunFolder,
        template: Checkpoint,
        *,
        every_steps: int,
        keep: int,
        watcher: Watcher,
    ) -> None:
        self._folder = folder
        self._template = template
        self._every_steps = every_steps
        self._keep = keep
        self._watcher = watcher
        self._saved_progress = template.progress if template.resumable else None
        self.best = template.best
        self._clock = _Phases()
        metric_lines, episode_lines = template.committed
        with _writing(folder.path):
            self._metric_file = LineFile(folder.path / "metrics.jsonl", metric_lines)
            self._episode_file = LineFile(
                folder.path / "episodes.csv", episode_lines, EPISODE_HEADER
            )
            self._timing = (folder.path / "timing.jsonl").open("a", encoding="utf-8")
        self._metrics = JsonLines(self._metric_file)

    def iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        finished = [(f.slot, episode) for f in fragments for episode in f.episodes]
        finished.sort(key=lambda pair: (pair[0], pair[1].end, pair[1].row))
        returns = [episode.episode_return for _, episode in finished]
        summary: dict[str, Any] = {
            "iteration": progress.iteration,
            "episodes": progress.episodes,
            "episodes_finished": len(finished),
            "episode_return_mean": sum(returns) / len(returns) if returns else None,
            "episode_length_mean": (
                sum(episode.length for _, episode in finished) / len(finished) if finished else None
            ),
            **metrics,
        }
        with _writing(self._folder.path):
            for slot, e in finished:
                self._episode_file.append(
                    f"{e.episode_return!r},{e.length},{progress.iteration},{progress.steps},"
                    f"{slot},{e.row},{e.episode},{int(e.truncated)}"
                )
            self._metrics.write(progress.steps, summary)
            timing = {"steps": progress.steps, **self._clock.lap()}
            self._timing.write(json.dumps(timing) + "\n")
        self._watcher.iteration({"steps": progress.steps, **summary}, returns)

    def evaluation(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> None:
        line = {"iteration": progress.iteration, **record.metrics()}
        with _writing(self._folder.path):
            self._metrics.write(progress.steps, line)
        better = self.offer_best(progress, record, policy)
        self._watcher.evaluation(progress.steps, record, better)

    def offer_best(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> bool:
        """Keep a policy that did better than any before it."""
        if self.best is not None and record.mean <= self.best.mean:
            return False
        self.best = record
        best = replace(self._template, policy=policy, progress=progress)
        with _writing(self._folder.path):
            files.save(self._folder.best, files.policy_only(best, record))
        return True

    def snapshot(self, take: Callable[[], Snapshot], progress: Progress, final: bool) -> None:
        before = self._saved_progress.steps if self._saved_progress else 0
        due = progress.steps // self._every_steps > before // self._every_steps
        if (due or final) and progress != self._saved_progress:
            with self.phase("checkpoint"):
                self._save(take())

    def save_evaluated(self, snapshot: Snapshot, record: EvaluationRecord) -> None:
        """Write the last checkpoint again, with the evaluation of its policy in it."""
        self._template = replace(self._template, evaluation=record)
        self._save(snapshot)
        result = {"steps": snapshot.progress.steps, "evaluation": record.as_dict()}
        with _writing(self._folder.path):
            text = json.dumps(result, indent=2) + "\n"
            files.write_atomically(self._folder.path / "result.json", text.encode())

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._clock.phase(name)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._metric_file.close()
            self._episode_file.close()
            self._timing.close()

    def _save(self, snapshot: Snapshot) -> None:
        """Logs first, then the checkpoint that counts their lines, then what points to it."""
        progress, folder = snapshot.progress, self._folder.path
        path = folder / "checkpoints" / f"step-{progress.steps:09d}.safetensors"
        with _writing(folder):
            self._metric_file.sync()
            self._episode_file.sync()
            self._timing.flush()
            files.save(
                path,
                replace(
                    self._template,
                    policy=snapshot.policy,
                    progress=progress,
                    best=self.best,
                    committed=(self._metric_file.lines, self._episode_file.lines),
                    snapshot=snapshot,
                ),
            )
            _point(self._folder.latest, path)
            for old in step_files(folder)[: -self._keep]:
                if old != path:
                    old.unlink(missing_ok=True)
        self._saved_progress = progress
        self._watcher.saved(path, progress)


class _Phases:
    """Wall and processor seconds by phase, lap by lap."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._wall, self._processor = time.monotonic(), time.process_time()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def lap(self) -> dict[str, float]:
        wall, processor = time.monotonic(), time.process_time()
        lap = {"wall_s": wall - self._wall, "driver_cpu_s": processor - self._processor}
        lap |= {f"{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        self._wall, self._processor = wall, processor
        return {name: round(value, 6) for name, value in lap.items()}


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A full or read-only disk is a sentence; what was committed before stays as it was."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written: {error.strerror or error}.",
            f"make room, then: rlflame resume {folder}",
        ) from error


def _locked(path: Path) -> int:
    """An exclusive lock that ends with this process, however it ends."""
    try:
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}.", "choose another folder with --out"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise CheckpointError(
            f"Another rlflame is training in {path}.",
            "wait for it, or start a new run with another --out",
        ) from error
    return lock


def is_locked(path: Path) -> bool:
    """Whether a trainer holds the folder now."""
    try:
        os.close(_locked(path))
    except CheckpointError:
        return True
    return False


def _point(link: Path, target: Path) -> None:
    """Make `link` another name of `target`; a copy where the disk knows no hard links."""
    temporary = link.with_name(f".{link.name}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        os.link(target, temporary)
    except OSError:
        files.write_atomically(link, target.read_bytes())
        return
    os.replace(temporary, link)
    files.sync_folder(link.parent)
