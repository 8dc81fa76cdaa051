"""Defines all metric names, the log files of a run and the phase timer.

metrics.jsonl and episodes.csv hold no wall-clock times, so two runs can be compared byte by byte.
Times are written to a separate file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlflame.config import regular_file
from rlflame.errors import CheckpointError

#: Maps each metric to its description. The live view, metrics.jsonl and the docs use these names.
NAMES: dict[str, str] = {
    "iteration": "Number of finished iterations, each of which learns from one batch.",
    "steps": "Number of environment steps in training.",
    "episodes": "Number of finished training episodes.",
    "episodes_finished": "Number of training episodes that ended in this iteration.",
    "episode_return_mean": "Mean return of the episodes that ended, with exploration.",
    "episode_length_mean": "Mean length of the episodes that ended.",
    "loss": "Loss that is minimised, averaged over the samples of the update.",
    "policy_gradient_loss": "Clipped surrogate part of the loss.",
    "value_loss": "Mean squared error of the critic.",
    "entropy_loss": "Negative mean entropy of the action distribution.",
    "approx_kl": "Estimate of how far the update moved the policy: mean(r - 1 - log r).",
    "clip_fraction": "Share of samples whose ratio left the clip range.",
    "clip_range": "Current clip range.",
    "clip_range_vf": "Current clip range of the value function.",
    "discount": "Current discount factor.",
    "explained_variance": "1 - Var(return - value) / Var(return), before the update.",
    "epochs_done": "Passes over the batch; fewer than configured if target_kl ended the update.",
    "learning_rate": "Current learning rate of Adam.",
    "gradient_norm": "Norm of the gradient of the last minibatch, before clipping.",
    "n_updates": "Number of optimizer steps since the start.",
    "actor_loss": "Mean of coefficient x log pi(a|s) - the critics' value of a, over the updates.",
    "critic_loss": "Half the sum of both critics' mean squared errors, averaged over the updates.",
    "ent_coef": "Entropy coefficient after the iteration.",
    "ent_coef_loss": "Mean of -log coefficient x (log pi + target entropy), over the updates.",
    "refused_minibatches": "Minibatches skipped because of NaN or infinity, since the start.",
    "std": "Mean standard deviation of Gaussian actions or, with gsde, of the noise matrix.",
    "eval_return_mean": "Mean return of an evaluation, without exploration.",
    "eval_return_low": "Lower end of the 95% bootstrap interval of this mean.",
    "eval_return_high": "Upper end of the 95% bootstrap interval of this mean.",
    "eval_return_std": "Standard deviation of the returns of an evaluation.",
    "eval_return_iqm": "Interquartile mean of the returns of an evaluation.",
    "eval_length_mean": "Mean episode length of an evaluation.",
    "eval_episodes": "Number of episodes of an evaluation.",
}

#: Maps each of the main metrics in the live view to its label and format.
LIVE_METRICS: dict[str, tuple[str, str]] = {
    "loss": ("loss", ".3g"),
    "approx_kl": ("kl", ".4f"),
    "clip_fraction": ("clipped", ".0%"),
    "explained_variance": ("explained variance", ".2f"),
    "actor_loss": ("actor", ".3g"),
    "critic_loss": ("critic", ".3g"),
    "ent_coef": ("entropy coefficient", ".3g"),
}

_TASKS = Path("/proc/self/task")
EPISODE_HEADER = "r,l,iteration,steps,slot,row,episode,truncated\n"


def read_last_returns(path: Path, count: int) -> list[float]:
    """Return the returns of the last episodes in episodes.csv; none if they cannot be read."""
    try:
        lines = deque(regular_file.read_lines(path), maxlen=count)
        return [float(line.partition(",")[0]) for line in lines if line != EPISODE_HEADER]
    except (OSError, ValueError):
        return []


class LineFile:
    """A log file. Each checkpoint stores its number of lines, without the header.

    Opening the file does not change its content. `truncate` removes the lines that were written
    after the checkpoint, because the work that they record will be repeated.
    """

    def __init__(self, path: Path, lines: int, header: str = "") -> None:
        self.lines = lines
        self._header = header
        self._end_offset = _find_end_offset(path, lines, header)
        self._file = regular_file.open_to_append(path)

    def truncate(self) -> None:
        self._file.truncate(self._end_offset)
        if self._end_offset == 0:
            self._file.write(self._header)

    def append(self, line: str) -> None:
        self._file.write(line + "\n")
        self.lines += 1

    def flush(self) -> None:
        """Make the lines visible to other processes, but do not sync them to disk."""
        self._file.flush()

    def sync(self) -> None:
        """Sync the lines to disk. Call this before saving a checkpoint."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _find_end_offset(path: Path, lines: int, header: str) -> int:
    """Return the size in bytes of the header and `lines` lines.

    Raises CheckpointError if lines are missing.
    """
    remaining, end = lines + header.count("\n"), 0
    if path.exists():
        with regular_file.open_to_read(path) as file:
            while remaining and (line := file.readline(regular_file.LINE_BYTES)).endswith(b"\n"):
                end += len(line)
                remaining -= 1
    if remaining and lines:
        raise CheckpointError(
            f"{path} lacks {min(remaining, lines)} of the {lines} lines its checkpoint counts.",
            "resume an earlier checkpoint file, or copy this checkpoint into an empty folder",
        )
    return end


class JsonLines(LineFile):
    """A log with one JSON object per line. Keys keep their insertion order."""

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        if unknown := metrics.keys() - NAMES.keys():
            raise KeyError(f"metrics without a description in NAMES: {sorted(unknown)}")
        # JSON has neither NaN nor infinity, so write null instead.
        numbers = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        self.append(json.dumps({"steps": step, **numbers}, allow_nan=False))


class PhaseTimer:
    """Measures the time of each phase, and the wall and CPU time of each lap."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._wall_s, self._processor_s, self._workers_cpu_s = self._read_clocks()

    @contextlib.contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def finish_lap(self) -> dict[str, float]:
        """Return the times of the current lap in seconds, and start a new lap."""
        wall, processor, workers = self._read_clocks()
        lap = {"wall_s": wall - self._wall_s, "driver_cpu_s": processor - self._processor_s}
        if workers is not None and self._workers_cpu_s is not None:
            # The time of a worker that has just ended may be missing for a moment.
            lap["workers_cpu_s"] = max(0.0, workers - self._workers_cpu_s)
        lap |= {f"{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        self._wall_s, self._processor_s, self._workers_cpu_s = wall, processor, workers
        return {name: round(value, 6) for name, value in lap.items()}

    def _read_clocks(self) -> tuple[float, float, float | None]:
        return time.monotonic(), time.process_time(), read_children_cpu_s()


def read_children_cpu_s() -> float | None:
    """Return the CPU seconds of all child processes, or None if unavailable."""
    if not (_TASKS / str(os.getpid()) / "children").exists():
        return None
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for children in _TASKS.glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended has no children
            ticks += sum(map(_read_cpu_ticks, children.read_text().split()))
    return usage.ru_utime + usage.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def _read_cpu_ticks(pid: str) -> int:
    """Return the CPU ticks of a process and its ended children, or 0 on error."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name in parentheses may contain spaces; utime is the twelfth word after it.
        stat = Path("/proc", pid, "stat").read_text(errors="replace")
        return sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return 0
