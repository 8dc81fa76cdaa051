"""A run's curves for TensorBoard, under RUN/tensorboard.

They are a view of the run's own record: where a run goes on, the file is written anew from the
lines that count, so curves have neither gaps nor doublings, and a run that began without
TensorBoard has them from its first step. Must not know: the loop, fleets, display.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rlflame.config.recipe import Recipe
from rlflame.storage.run_files import Line
from rlflame.storage.run_reader import read
from rlflame.storage.tracking.event_file import EventFile, Scalar

FOLDER = "tensorboard"
#: Hyperparameters are beside the numbers of their own folder alone: here the final score. Beside
#: all curves, the table would show the first few of these by name.
SESSION = f"{FOLDER}/hparams"
_SUFFIX = ".rlflame"
#: Names of the record under which TensorBoard's users look for something else.
TAGS = {
    "policy_gradient_loss": "Loss/policy_loss",
    "actor_loss": "Loss/policy_loss",
    "value_loss": "Loss/value_loss",
    "critic_loss": "Loss/value_loss",
    "entropy_loss": "Loss/entropy_loss",
    "learning_rate": "Info/learning_rate",
    "episode_return_mean": "Rewards/rew_avg",
    "episode_length_mean": "Game/ep_len_avg",
    "episodes_finished": "Game/episodes_finished",
    "episodes": "Game/episodes",
    "retried": "Fleet/retried",
    "speculated": "Fleet/speculated",
    "bytes_out": "Fleet/bytes_out",
    "bytes_in": "Fleet/bytes_in",
    "workers": "Fleet/workers",
    "final_return": "Test/cumulative_reward",
}
FINAL = TAGS["final_return"]
RATE = "Time/step_per_second"
_IMPLIED = ("steps", "iteration")


def note(folder: Path) -> str:
    """What to type to see them."""
    command = f"tensorboard --logdir {folder}"
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("tensorboard")
        return f"Curves for TensorBoard: {command}"
    return (
        "tensorboard is not installed, so its curves are written and cannot be looked at here: "
        f"pip install 'rlflame[tensorboard]', then {command}"
    )


class TensorBoard:
    """A sink of everything that is measured."""

    def __init__(
        self, folder: Path, recipe: Recipe, clock: Callable[[], float] = time.time
    ) -> None:
        """Where the folder has a record already, begin with it."""
        self._clock = clock
        self._before = 0
        run = read(folder)
        measured = sum(_seconds(line) for line in run.timing)
        # As if it had ended just now, so that the time between its points is what it was.
        began = clock() - measured
        name = f"events.out.tfevents.{clock():.6f}.{socket.gethostname()}.{os.getpid()}{_SUFFIX}"
        self._file, self._session = (
            EventFile(_emptied(folder / inside) / name, began) for inside in (FOLDER, SESSION)
        )
        self._session.begin_session(began, hyperparameters(recipe))
        laps = {int(line["steps"]): line for line in run.timing if not line.get("closing")}
        at = began
        for line in run.metrics:
            lap = laps.pop(int(line["steps"]), {}) if "eval_return_mean" not in line else {}
            at += _seconds(lap)
            self._put(at, int(line["steps"]), {**lap, **line})

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._put(self._clock(), step, metrics)

    def close(self) -> None:
        self._session.end_session(self._clock())
        for file in (self._file, self._session):
            file.close()

    def _put(self, wall_time: float, step: int, metrics: Mapping[str, Any]) -> None:
        values = {
            tag(name): float(value)
            for name, value in metrics.items()
            if name not in _IMPLIED and isinstance(value, int | float)
        }
        if tag("loss") in values and tag("policy_gradient_loss") not in values:
            # Of an algorithm with one loss only, it is the policy's.
            values[tag("policy_gradient_loss")] = values.pop(tag("loss"))
        if _seconds(metrics) > 0.0:
            values[RATE] = (step - self._before) / _seconds(metrics)
            self._before = step
        self._file.scalars(wall_time, step, values)
        if FINAL in values:
            self._session.scalars(wall_time, step, {FINAL: values[FINAL]})


def _emptied(folder: Path) -> Path:
    """Made, and rid of what an earlier process of this run wrote there."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
        old.unlink()
    return folder


def tag(name: str) -> str:
    """Where TensorBoard shows a name of the record: the group before the slash."""
    if name in TAGS:
        return TAGS[name]
    if name.startswith("eval_"):
        return f"Evaluation/{name.removeprefix('eval_')}"
    if name.endswith("_s"):
        return f"Time/{name}"
    return f"Loss/{name}" if name.endswith("loss") else f"Info/{name}"


def hyperparameters(recipe: Recipe) -> dict[str, Scalar]:
    """What was set, under full names; what is absent is left out."""
    found: dict[str, Scalar] = {}

    def collect(table: Mapping[str, Any], prefix: str) -> None:
        for name, value in table.items():
            if isinstance(value, Mapping):
                collect(value, f"{prefix}{name}.")
            elif isinstance(value, str | bool | int | float):
                found[prefix + name] = value
            elif value is not None:
                found[prefix + name] = str(value)

    collect(recipe.model_dump(mode="json"), "")
    return found


def _seconds(line: Line | Mapping[str, Any]) -> float:
    value = line.get("wall_s")
    return float(value) if isinstance(value, int | float) else 0.0
