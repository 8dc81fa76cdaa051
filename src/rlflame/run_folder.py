"""A run on disk: its lock, its config, its logs and its checkpoints.

    config.toml          recipe and runtime
    metrics.jsonl        one line an iteration, one an evaluation; no wall clock
    episodes.csv         one line a training episode; no wall clock
    timing.jsonl         wall and processor seconds of each iteration, by phase
    machines.json        every process that trained here, the machine and the workers it had
    checkpoints/         step-000100000.safetensors, the newest few
    replay/              the segments of a replay that these checkpoints name
    latest.safetensors   the newest checkpoint
    best.safetensors     the policy with the best evaluation
    result.json          the final evaluation
    videos/              short films of the policy, where they were asked for

Must not know: the loop, algorithms, display.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rlflame import checkpoint as files
from rlflame import tensor_file
from rlflame.checkpoint import Checkpoint
from rlflame.errors import CheckpointError
from rlflame.evaluate import EvaluationRecord
from rlflame.machine import children_cpu_s
from rlflame.metrics import EPISODE_HEADER, JsonLines, LineFile, PhaseTimes, Sink
from rlflame.rollout.spec import Fragment, PolicyArrays
from rlflame.segments import SegmentFiles
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
        if wanted.name in ("", ".."):
            wanted = wanted.resolve()
        path = wanted
        for number in itertools.count(2):
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                path = wanted.parent / f"{wanted.name}-{number}"
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be made: {error.strerror}.", "choose another with --out"
                ) from error
        return cls(path, _locked(path))

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder, rid of files that were half written when their process died."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is no run folder.", "rlflame runs lists them")
        folder = cls(path, _locked(path))
        with contextlib.suppress(OSError):
            for place in ("", "checkpoints/", "replay/"):
                for leftover in path.glob(f"{place}.*{tensor_file.TEMPORARY}"):
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
    return sorted((path for path in found if _STEP_FILE.fullmatch(path.name)), key=_steps_of)


def _steps_of(path: Path) -> int:
    return int(path.name[5:-12])


def _step_file(folder: Path, steps: int) -> Path:
    return folder / "checkpoints" / f"step-{steps:09d}.safetensors"


def _later(folder: Path, progress: Progress) -> list[Path]:
    return [file for file in step_files(folder) if _steps_of(file) > progress.steps]


def _segments_needed(folder: Path) -> set[str]:
    """What any checkpoint names that lies here, those that were set aside among them."""
    found = [*folder.glob("*.safetensors*"), *folder.glob("checkpoints/*.safetensors*")]
    return set().union(*map(files.segments_named_in, found))


def _is_later(policy: Path, progress: Progress) -> bool:
    try:
        return files.load(policy).progress.steps > progress.steps
    except CheckpointError:  # absent, or of no use to anybody
        return False


def newest_checkpoint(target: Path, note: Callable[[str], None]) -> Checkpoint:
    """The newest valid checkpoint of a run folder, or the one in the file that is named.

    `latest.safetensors` comes last: a process may have died between writing a checkpoint and
    pointing to it.
    """
    if not target.is_dir():
        return files.load(target)
    latest = target / "latest.safetensors"
    candidates = [*reversed(step_files(target)), *([latest] if latest.exists() else ())]
    first: CheckpointError | None = None
    for path in candidates:
        try:
            return files.load(path)
        except CheckpointError as error:
            first = first or error
            note(f"{error.message} Trying an earlier checkpoint.")
    if first is not None:
        raise first
    config = target / "config.toml"
    raise CheckpointError(
        f"{target} holds no checkpoint.",
        f"begin again: rlflame train --config {config}"
        if config.exists()
        else "rlflame runs lists the runs that can be resumed",
    )


def named_policy(path: Path) -> Checkpoint:
    """The policy in a file; for a run folder, an error with the file that may have been meant."""
    best = path / "best.safetensors"
    if path.is_dir() and best.exists():
        raise CheckpointError(f"{path} is a folder.", f"the best policy in it: {best}")
    return files.load(path)


class Watcher(Protocol):
    """Whoever shows a run to people or programs."""

    def iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None: ...

    def evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None: ...

    def saved(self, path: Path, progress: Progress) -> None: ...

    def note(self, text: str) -> None: ...


class FileRecorder:
    """Writes a run's record and its checkpoints; the trainer's Recorder.

    A record that goes on from a checkpoint takes its folder back to it: the logs are cut to the
    lines it counts, and what is of a later step, checkpoints and the best policy, is set aside
    under the name `*.later`: it is damaged, or of a future that will be worked out again. A
    checkpoint that lies in a folder without any logs begins new ones there.
    """

    def __init__(
        self,
        folder: RunFolder,
        template: Checkpoint,
        *,
        every_steps: int,
        keep: int,
        watcher: Watcher,
        counts: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._folder = folder
        self._template = template
        self._every_steps = every_steps
        self._keep = keep
        self._watcher = watcher
        self._counts = counts
        self._beside: list[Sink] = []
        self._saved: Progress | None = None
        self.best = template.best
        self._times = PhaseTimes(children_cpu_s)
        begun = template.snapshot
        self._segments = SegmentFiles(folder.path, begun.segments if begun else ())
        with writing(folder.path), contextlib.ExitStack() as opened:
            self._open_logs(opened)
            if template.snapshot is not None:
                # Written anew before the logs are cut, so that at every moment the newest
                # checkpoint finds its lines; and so that a changed recipe is not forgotten.
                self._go_back(template.snapshot)
            self._metric_file.cut()
            self._episode_file.cut()
            self._open = opened.pop_all()
        self._template = replace(template, evaluation=None)

    def _open_logs(self, opened: contextlib.ExitStack) -> None:
        folder = self._folder.path
        metrics, episodes = folder / "metrics.jsonl", folder / "episodes.csv"
        metric_lines, episode_lines = self._template.committed
        if metric_lines and not metrics.exists() and not episodes.exists():
            self._watcher.note(f"{folder} has no record of what was before: a new one begins.")
            metric_lines = episode_lines = 0
        self._metric_file = LineFile(metrics, metric_lines)
        self._metrics: Sink = JsonLines(self._metric_file)
        opened.callback(self._metrics.close)
        self._episode_file = LineFile(episodes, episode_lines, EPISODE_HEADER)
        opened.callback(self._episode_file.close)
        self._timing = opened.enter_context((folder / "timing.jsonl").open("a", encoding="utf-8"))

    def iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        finished = [(f.slot, episode) for f in fragments for episode in f.episodes]
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
        with writing(self._folder.path):
            for slot, e in finished:
                self._episode_file.append(
                    f"{e.episode_return!r},{e.length},{progress.iteration},{progress.steps},"
                    f"{slot},{e.row},{e.episode},{int(e.truncated)}"
                )
            self._metrics.write(progress.steps, summary)
            timing = {"steps": progress.steps, **self._times.lap(), **self._counts()}
            self._timing.write(json.dumps(timing) + "\n")
            for sink in self._beside:
                sink.write(progress.steps, {**timing, **summary})
        self._watcher.iteration({"steps": progress.steps, **summary}, returns)

    def evaluation(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> None:
        line = {"iteration": progress.iteration, **record.metrics()}
        with writing(self._folder.path):
            for sink in (self._metrics, *self._beside):
                sink.write(progress.steps, line)
        better = self.offer_best(progress, record, policy)
        self._watcher.evaluation(progress.steps, record, better)

    def offer_best(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> bool:
        """Keep a policy that did better than any before it, or as well over more episodes."""
        held = self.best
        if held is not None and (record.mean, record.episodes) <= (held.mean, held.episodes):
            return False
        self.best = record
        best = replace(self._template, policy=policy, progress=progress)
        with writing(self._folder.path):
            files.save(self._folder.best, files.policy_only(best, record))
        return True

    def snapshot(self, take: Callable[[], Snapshot], progress: Progress, final: bool) -> None:
        saved, every = self._saved, self._every_steps
        due = saved is None or progress.steps // every > saved.steps // every
        if (due or final) and progress != saved:
            with self.phase("checkpoint"):
                self._save(take())

    def save_evaluated(self, snapshot: Snapshot, record: EvaluationRecord) -> None:
        """Write the last checkpoint again, with the evaluation of its policy in it."""
        self._template = replace(self._template, evaluation=record)
        self._save(snapshot)
        result = {"steps": snapshot.progress.steps, "evaluation": record.as_dict()}
        with writing(self._folder.path):
            text = json.dumps(result, indent=2) + "\n"
            tensor_file.write_atomically(self._folder.path / "result.json", text.encode())
            for sink in self._beside:
                sink.write(snapshot.progress.steps, {"final_return": record.mean})

    def also(self, sink: Sink) -> None:
        """Somewhere else to write what is recorded from now on, timing included."""
        self._beside.append(sink)
        self._open.callback(sink.close)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._times.phase(name)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._open.close()

    def _save(self, snapshot: Snapshot) -> None:
        """Logs first, then the checkpoint that counts their lines."""
        with writing(self._folder.path):
            self._metric_file.sync()
            self._episode_file.sync()
            self._timing.flush()
            path = self._commit(snapshot)
        self._watcher.saved(path, snapshot.progress)

    def _go_back(self, snapshot: Snapshot) -> None:
        """Commit where the run goes on from; its best policy is then of no later step either."""
        progress, file = snapshot.progress, self._folder.best
        if not (_later(self._folder.path, progress) and _is_later(file, progress)):
            self._commit(snapshot)
            return
        best = self._best_until_now()
        if best is None and self.best is not None:
            self.best = None
            self._watcher.note("The best policy until here is not kept; the next one counts.")
        self._commit(snapshot)
        file.replace(f"{file}.later")
        if best is not None:
            files.save(file, best)

    def _best_until_now(self) -> Checkpoint | None:
        """The best policy that the run had when it stood here, if a checkpoint still holds it."""
        record = self.best
        if record is None:
            return None
        with contextlib.suppress(OSError, ValueError, CheckpointError):
            text = (self._folder.path / "metrics.jsonl").read_text("utf-8")
            for line in text.splitlines()[: self._metric_file.lines]:
                said = json.loads(line)
                if said.get("eval_return_mean") == record.mean:
                    held = files.load(_step_file(self._folder.path, int(said["steps"])))
                    return files.policy_only(held, record)
        return None

    def _commit(self, snapshot: Snapshot) -> Path:
        """Segments, the checkpoint, then what points to it; only then is what is old removed."""
        progress, folder = snapshot.progress, self._folder.path
        path = _step_file(folder, progress.steps)
        path.parent.mkdir(exist_ok=True)
        self._segments.keep(snapshot.segments)
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
        later = _later(folder, progress)
        for file in later:
            file.replace(f"{file}.later")
        if later:
            self._watcher.note(f"Back to step {progress.steps}: what was later is kept as *.later.")
        _point(self._folder.latest, path)
        for old in step_files(folder)[: -self._keep]:
            old.unlink(missing_ok=True)
        self._segments.prune(lambda: _segments_needed(folder))
        self._saved = progress
        return path


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
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
    except BlockingIOError as error:
        os.close(lock)
        raise CheckpointError(
            f"Another rlflame is training in {path}.",
            "wait for it, or start a new run with another --out",
        ) from error
    except OSError as error:
        os.close(lock)
        raise CheckpointError(
            f"{path} cannot be locked: {error.strerror}.", "choose a folder on a local disk"
        ) from error
    return lock


def is_locked(path: Path) -> bool:
    """Whether a trainer holds the folder now."""
    try:
        lock = os.open(path / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _point(link: Path, target: Path) -> None:
    """Make `link` another name of `target`; a copy where the disk knows no hard links."""
    temporary = link.with_name(f".{link.name}{tensor_file.TEMPORARY}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        os.link(target, temporary)
    except OSError:
        tensor_file.write_atomically(link, target.read_bytes())
        return
    os.replace(temporary, link)
    tensor_file.sync_folder(link.parent)
