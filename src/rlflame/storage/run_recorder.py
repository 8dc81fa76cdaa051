"""Writes the logs, the checkpoints and the machine descriptions of a run."""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from rlflame import __version__
from rlflame.config import regular_file
from rlflame.errors import CheckpointError, RlflameError
from rlflame.fleet.base import Fleet
from rlflame.rollout.machine import describe_machine
from rlflame.rollout.task import EpisodeStat, Fragment, PolicyArrays
from rlflame.storage import checkpoint, run_reader, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.metrics import EPISODE_HEADER, JsonLines, LineFile, PhaseTimer
from rlflame.storage.replay_segments import SegmentFiles
from rlflame.storage.run_folder import (
    RunFolder,
    find_needed_segments,
    get_step_path,
    is_later,
    list_later_files,
    list_step_files,
    report_disk_errors,
)
from rlflame.storage.tracking.tensorboard import TensorBoard
from rlflame.training.evaluation import EvaluationRecord
from rlflame.training.trainer import Progress, Snapshot


class RunObserver(Protocol):
    """Displays the progress of a run."""

    def show_iteration(self, metrics: dict[str, Any], returns: Sequence[float]) -> None: ...

    def show_evaluation(self, steps: int, record: EvaluationRecord, best: bool) -> None: ...

    def show_checkpoint(self, path: Path, progress: Progress) -> None: ...

    def show_note(self, text: str) -> None: ...


class FileRecorder:
    """Writes a run's logs and checkpoints; implements the trainer's Recorder.

    When a run continues from a checkpoint, the recorder rewinds the folder to that checkpoint. It
    removes the log lines that were written later. Checkpoints and best policies from later steps
    are renamed to `*.later`, because they are damaged or will be computed again. If the folder has
    no logs, the recorder starts new ones.
    """

    def __init__(
        self,
        folder: RunFolder,
        template: Checkpoint,
        *,
        every_steps: int,
        every_minutes: float,
        keep_count: int,
        observer: RunObserver,
        take_counts: Callable[[], dict[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._template = template
        self._every_steps = every_steps
        self._every_s = 60.0 * every_minutes
        self._clock = clock
        self._saved_s = clock()
        self._keep_count = keep_count
        self._observer = observer
        self._take_counts = take_counts
        self._sinks: list[TensorBoard] = []
        self._saved_progress: Progress | None = None
        self.best = template.best
        self._timer = PhaseTimer()
        self._steps = template.progress.steps
        snapshot = template.snapshot
        self._segments = SegmentFiles(folder.path, snapshot.segments if snapshot else ())
        with report_disk_errors(folder.path), contextlib.ExitStack() as stack:
            self._open_logs(stack)
            if template.snapshot is not None:
                # Save the checkpoint again before the logs are truncated, so that the latest
                # checkpoint never counts lines that are missing. This also saves a changed recipe.
                self._rewind(template.snapshot)
            self._metric_file.truncate()
            self._episode_file.truncate()
            self._resources = stack.pop_all()
        self._template = replace(template, evaluation=None)

    def _open_logs(self, stack: contextlib.ExitStack) -> None:
        folder = self._folder.path
        metrics, episodes = folder / "metrics.jsonl", folder / "episodes.csv"
        metric_lines, episode_lines = self._template.line_counts
        if metric_lines and not metrics.exists() and not episodes.exists():
            self._observer.show_note(f"{folder} has no earlier logs; new logs start here.")
            metric_lines = episode_lines = 0
        self._metric_file = JsonLines(metrics, metric_lines)
        stack.callback(self._metric_file.close)
        self._episode_file = LineFile(episodes, episode_lines, EPISODE_HEADER)
        stack.callback(self._episode_file.close)
        self._timing = stack.enter_context(regular_file.open_to_append(folder / "timing.jsonl"))

    def record_iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        episodes = _collect_episodes(fragments)
        returns = [episode.episode_return for _, episode in episodes]
        summary: dict[str, Any] = {
            "iteration": progress.iteration,
            "episodes": progress.episodes,
            "episodes_finished": len(episodes),
            "episode_return_mean": sum(returns) / len(returns) if returns else None,
            "episode_length_mean": (
                sum(episode.length for _, episode in episodes) / len(episodes) if episodes else None
            ),
            **metrics,
        }
        with self._report_write_errors():
            for slot, e in episodes:
                self._episode_file.append(
                    f"{e.episode_return!r},{e.length},{progress.iteration},{progress.steps},"
                    f"{slot},{e.row},{e.episode},{int(e.truncated)}"
                )
            self._metric_file.write(progress.steps, summary)
            self._steps = progress.steps
            timing = self._write_timing()
            for sink in self._sinks:
                sink.write(progress.steps, {**timing, **summary})
            self._flush_logs()
        self._observer.show_iteration({"steps": progress.steps, **summary}, returns)

    def record_evaluation(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> None:
        line = {"iteration": progress.iteration, **record.to_metrics()}
        with self._report_write_errors():
            self._metric_file.write(progress.steps, line)
            for sink in self._sinks:
                sink.write(progress.steps, line)
            self._flush_logs()
        is_best = self.offer_best(progress, record, policy)
        self._observer.show_evaluation(progress.steps, record, is_best)

    def offer_best(
        self, progress: Progress, record: EvaluationRecord, policy: PolicyArrays
    ) -> bool:
        """Save the policy if it is the best so far; return whether it was saved."""
        previous_best = self.best
        if previous_best is not None and (record.mean, record.episodes) <= (
            previous_best.mean,
            previous_best.episodes,
        ):
            return False
        self.best = record
        best = replace(self._template, policy=policy, progress=progress)
        with self._report_write_errors():
            checkpoint.save(self._folder.best, checkpoint.make_policy_checkpoint(best, record))
        return True

    def record_snapshot(
        self, take: Callable[[], Snapshot], progress: Progress, final: bool
    ) -> None:
        previous, every_steps = self._saved_progress, self._every_steps
        is_due = previous is None or progress.steps // every_steps > previous.steps // every_steps
        is_due = is_due or self._clock() - self._saved_s >= self._every_s
        if (is_due or final or self._folder.is_unlocked) and progress != previous:
            with self.time_phase("checkpoint"):
                self._save(take())
        self._folder.check_lock()

    def save_final_evaluation(self, snapshot: Snapshot, record: EvaluationRecord) -> None:
        """Write the last checkpoint again, with the final evaluation of its policy."""
        self._template = replace(self._template, evaluation=record)
        self._save(snapshot)
        result = {"steps": snapshot.progress.steps, "evaluation": record.as_dict()}
        with self._report_write_errors():
            text = json.dumps(result, indent=2) + "\n"
            safetensors_file.write_atomically(self._folder.path / "result.json", text.encode())
            for sink in self._sinks:
                sink.write(snapshot.progress.steps, {"final_return": record.mean})

    def add_sink(self, sink: TensorBoard) -> None:
        """Write all future metrics, including timing, to this sink as well."""
        self._sinks.append(sink)
        self._resources.callback(sink.close)

    def time_phase(self, name: str) -> AbstractContextManager[None]:
        return self._timer.time_phase(name)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._saved_progress is not None and not self._timing.closed:
                # This line covers the evaluation and the checkpoint after the last iteration.
                self._write_timing(closing=1)
        with contextlib.suppress(OSError):
            self._resources.close()

    @contextlib.contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        """Check the folder before a write, and report disk errors during it."""
        with report_disk_errors(self._folder.path):
            self._folder.check()
            yield

    def _write_timing(self, **extra: int) -> dict[str, Any]:
        """Add a line to timing.jsonl, with times and counts since the last line."""
        timing = {"steps": self._steps, **extra, **self._timer.finish_lap(), **self._take_counts()}
        self._timing.write(json.dumps(timing) + "\n")
        return timing

    def _flush_logs(self) -> None:
        """Flush the logs, so that readers such as `rlflame runs` see the progress."""
        for file in (self._metric_file, self._episode_file, self._timing):
            file.flush()

    def _save(self, snapshot: Snapshot) -> None:
        """Sync the logs, then write the checkpoint that counts their lines."""
        with self._report_write_errors():
            self._folder.check_all()
            self._metric_file.sync()
            self._episode_file.sync()
            self._timing.flush()
            path = self._commit(snapshot)
        self._observer.show_checkpoint(path, snapshot.progress)

    def _rewind(self, snapshot: Snapshot) -> None:
        """Save the state to continue from; restore the best policy of that step."""
        progress, file = snapshot.progress, self._folder.best
        self._set_aside(snapshot)
        if not (list_later_files(self._folder.path, progress) and is_later(file, progress)):
            self._commit(snapshot)
            return
        best = self._find_best()
        if best is None and self.best is not None:
            self.best = None
            self._observer.show_note(
                "The best policy of this step was not kept; the next evaluation sets a new one."
            )
        self._commit(snapshot)
        _set_file_aside(file)
        if best is not None:
            checkpoint.save(file, best)

    def _set_aside(self, snapshot: Snapshot) -> None:
        """Keep an existing checkpoint of this step if its state is different."""
        # It gets the name `*.replaced`, `*.replaced-2` and so on. Its segments are kept, too.
        path = get_step_path(self._folder.path, snapshot.progress.steps)
        with contextlib.suppress(CheckpointError):
            existing = checkpoint.load(path)
            if existing.state_digest != checkpoint.compute_state_digest(self._template):
                replaced_path = _make_aside_path(path, "replaced")
                _link(replaced_path, path)
                self._observer.show_note(
                    f"The old checkpoint of step {snapshot.progress.steps} is now {replaced_path}."
                )

    def _find_best(self) -> Checkpoint | None:
        """Return the best policy up to this step, if a checkpoint still has it."""
        with contextlib.suppress(CheckpointError):
            lines = run_reader.read_lines(self._folder.path / "metrics.jsonl")
            for line in lines[: self._metric_file.lines]:
                if self.best is not None and line.get("eval_return_mean") == self.best.mean:
                    source = checkpoint.load(get_step_path(self._folder.path, line["steps"]))
                    return checkpoint.make_policy_checkpoint(source, self.best)
        return None

    def _commit(self, snapshot: Snapshot) -> Path:
        """Write the segments, the checkpoint and its link, then remove old files."""
        progress, folder = snapshot.progress, self._folder.path
        path = get_step_path(folder, progress.steps)
        path.parent.mkdir(exist_ok=True)
        self._segments.write_missing(snapshot.segments)
        checkpoint.save(
            path,
            replace(
                self._template,
                policy=snapshot.policy,
                progress=progress,
                best=self.best,
                line_counts=(self._metric_file.lines, self._episode_file.lines),
                snapshot=snapshot,
            ),
        )
        later_paths = list_later_files(folder, progress)
        for file in later_paths:
            _set_file_aside(file)
        if later_paths:
            self._observer.show_note(
                f"Rewound to step {progress.steps}; later checkpoints are kept as *.later."
            )
        _link(self._folder.latest, path)
        for old in list_step_files(folder)[: -self._keep_count]:
            old.unlink(missing_ok=True)
        self._segments.prune(lambda: find_needed_segments(folder))
        self._saved_progress, self._saved_s = progress, self._clock()
        return path


def _collect_episodes(fragments: Sequence[Fragment]) -> list[tuple[int, EpisodeStat]]:
    """Return the episodes of an iteration with their slots, in a fixed order.

    Fragments list episodes in the order in which they end, short ones first. That order would bias
    a moving average over the last episodes towards long ones.
    """
    episodes = [(fragment.slot, episode) for fragment in fragments for episode in fragment.episodes]
    return sorted(episodes, key=lambda item: (item[0], item[1].row, item[1].episode))


def _set_file_aside(file: Path) -> None:
    file.replace(_make_aside_path(file, "later"))
    file.unlink(missing_ok=True)  # replace() does nothing if both names are links to one file


def _make_aside_path(file: Path, word: str) -> Path:
    """Return an unused path beside the file, or the path of an identical copy."""
    ends = itertools.chain([word], (f"{word}-{number}" for number in itertools.count(2)))
    paths = (file.with_name(f"{file.name}.{end}") for end in ends)
    return next(p for p in paths if not p.exists() or filecmp.cmp(file, p, shallow=False))


def _link(link: Path, target: Path) -> None:
    """Make `link` a hard link to `target`, or a copy if links are unsupported."""
    temporary = link.with_name(f".{link.name}{safetensors_file.TEMPORARY_SUFFIX}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        os.link(target, temporary)
    except OSError:
        safetensors_file.write_atomically(link, target.read_bytes())
        return
    os.replace(temporary, link)
    safetensors_file.sync_folder(link.parent)


class MachineLog:
    """Writes machines.json, with an entry per process that trained the run."""

    def __init__(self, folder: RunFolder, fleet: Fleet, steps: int) -> None:
        self._folder = folder
        self._fleet = fleet
        self._previous_entries: list[Any] = []
        with contextlib.suppress(ValueError, RecursionError, CheckpointError):
            entries = json.loads(run_reader.read_text(folder.path / "machines.json"))
            self._previous_entries = entries if isinstance(entries, list) else []
        self._entry: dict[str, Any] = {
            "steps": steps,
            "began_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "rlflame": __version__,
            "fleet": fleet.name,
            "capacity": fleet.capacity,
            "machine": describe_machine(),
            "workers": [],
            "episodes": None,
            "shared_batches": None,
        }
        self._write()

    def record_work(self, episodes: Mapping[str, int], shared_batches: int) -> None:
        """Record the workers, their episodes, and the number of batches that learners shared."""
        # Called after training, because workers may join late.
        self._entry |= {"episodes": dict(episodes), "shared_batches": shared_batches}
        # The fleet may have been chosen only during the run.
        self._entry["fleet"], self._entry["capacity"] = self._fleet.name, self._fleet.capacity
        with contextlib.suppress(RlflameError):  # not worth an error at the end of a run
            self._entry["workers"] = _group_workers(self._fleet)
        self._write()

    def _write(self) -> None:
        text = json.dumps([*self._previous_entries, self._entry], indent=1) + "\n"
        with report_disk_errors(self._folder.path):
            self._folder.check()
            safetensors_file.write_atomically(self._folder.path / "machines.json", text.encode())


def _group_workers(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the workers' descriptions; merge and count identical ones."""
    groups: dict[str, dict[str, Any]] = {}
    for worker in fleet.probe():
        facts = {name: value for name, value in worker.items() if name not in ("name", "pid")}
        group = groups.setdefault(json.dumps(facts, sort_keys=True), {"number": 0, **facts})
        group["number"] += 1
    return [*groups.values()]
