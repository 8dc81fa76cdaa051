"""The closed list of metric names, each explained, and the sinks they are written to.

Sinks of a run's own record hold no wall clock, so two runs can be compared byte by byte; timing
goes to a file of its own. Must not know: where numbers come from.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

#: name -> what it measures. The live view, metrics.jsonl and the docs use these names.
NAMES: dict[str, str] = {
    "iteration": "Iterations finished: collect one batch, learn from it.",
    "steps": "Environment steps taken in training.",
    "episodes": "Training episodes finished.",
    "episodes_finished": "Episodes that ended in this iteration.",
    "episode_return_mean": "Mean return of those, with exploration.",
    "episode_length_mean": "Mean length of those.",
    "loss": "The minimised loss, averaged over the update's samples.",
    "policy_gradient_loss": "The clipped surrogate part of the loss.",
    "value_loss": "Mean squared error of the critic.",
    "entropy_loss": "Minus the mean entropy of the action distribution.",
    "approx_kl": "Estimate of how far the update moved the policy: mean(r - 1 - log r).",
    "clip_fraction": "Share of samples whose ratio left the clip range.",
    "clip_range": "The clip range in force.",
    "clip_range_vf": "The value clip range in force.",
    "explained_variance": "1 - Var(return - value) / Var(return), before the update.",
    "epochs_done": "Passes over the batch; fewer than asked for when target_kl stopped them.",
    "learning_rate": "Adam's step size in force.",
    "gradient_norm": "Norm of the last minibatch's gradient before clipping.",
    "n_updates": "Optimizer steps since the start.",
    "refused_minibatches": "Minibatches refused because of NaN or infinity, since the start.",
    "std": "Mean standard deviation of Gaussian actions.",
    "eval_return_mean": "Mean return of an evaluation, without exploration.",
    "eval_return_low": "Lower end of its 95% bootstrap interval.",
    "eval_return_high": "Upper end of its 95% bootstrap interval.",
    "eval_return_std": "Standard deviation over its episodes.",
    "eval_return_iqm": "Mean of the middle half of its episodes.",
    "eval_length_mean": "Mean length of its episodes.",
    "eval_episodes": "Episodes it ran.",
}

EPISODE_HEADER = "r,l,iteration,steps,slot,row,episode,truncated\n"


class Sink(Protocol):
    """Where metrics go. Nothing else prints."""

    def write(self, step: int, metrics: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class LineFile:
    """An append-only text file that can be cut back to a committed number of lines."""

    def __init__(self, path: Path, committed_lines: int, header: str = "") -> None:
        self._path = path
        self._header = header
        self._truncate(committed_lines)
        self._file = path.open("a", encoding="utf-8", newline="")
        self.lines = committed_lines

    def append(self, line: str) -> None:
        self._file.write(line + "\n")
        self.lines += 1

    def sync(self) -> None:
        """On return the lines are on disk: called before the checkpoint that counts them."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _truncate(self, lines: int) -> None:
        """Lines written after the last checkpoint belong to work that will be done again."""
        keep = 0
        if self._path.exists():
            with self._path.open("rb") as file:
                wanted = lines + self._header.count("\n")
                for line in file:
                    if wanted == 0 or not line.endswith(b"\n"):
                        break
                    keep += len(line)
                    wanted -= 1
                if wanted and lines:
                    raise OSError(
                        f"{self._path} has lost {wanted} of the {lines} lines "
                        "that the checkpoint counts"
                    )
            with self._path.open("r+b") as file:
                file.truncate(keep)
        elif lines:
            raise OSError(f"{self._path} is missing, and the checkpoint counts {lines} lines of it")
        if keep == 0 and self._header:
            self._path.write_text(self._header, encoding="utf-8")


class JsonLines:
    """One JSON object a line; the order of keys is the order of writing."""

    def __init__(self, file: LineFile) -> None:
        self._file = file

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        unknown = metrics.keys() - NAMES.keys()
        if unknown:
            raise KeyError(f"metrics that nobody explained: {sorted(unknown)}")
        self._file.append(json.dumps({"steps": step, **metrics}))

    def close(self) -> None:
        self._file.close()
