"""Writes a run's curves for TensorBoard to RUN/tensorboard.

The curves are derived from the run's own logs. A resumed run rewrites them from the lines that its
checkpoint counts, so the curves have no gaps or duplicates. A run that started without TensorBoard
also gets curves from its first step.

Events are written with the record writer of the `tensorboard` package. Its EventFileWriter is not
used because it imports TensorFlow (if installed), writes in a thread and follows symbolic links.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlflame.config import nested_dict
from rlflame.config.recipe import Recipe
from rlflame.config.regular_file import open_unless_link
from rlflame.errors import check_extra
from rlflame.storage.run_reader import Line, read_run

Scalar = str | bool | int | float

FOLDER = "tensorboard"
#: A separate folder for the hyperparameters. TensorBoard's hyperparameter table shows all scalars
#: of this folder, so the folder contains only the final score, not the curves.
SESSION = f"{FOLDER}/hparams"
_SUFFIX = ".rlflame"
#: Tags for metrics that have conventional names in TensorBoard.
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
FINAL_TAG = TAGS["final_return"]
RATE_TAG = "Time/step_per_second"
_AXIS_NAMES = ("steps", "iteration")


def format_view_hint(folder: Path) -> str:
    """Return a note with the command that shows the curves."""
    return f"To see the curves: tensorboard --logdir {folder}"


def check_available() -> None:
    check_extra("tensorboard", "its event files cannot be written", "tensorboard")


class EventFile:
    """An event file that is flushed after every write."""

    def __init__(self, path: Path, wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._make_event = Event
        self._writer = RecordWriter(open(path, "wb", opener=open_unless_link))  # noqa: SIM115
        self._write(wall_time, file_version="brain.Event:2")
        # This event makes TensorBoard discard the events in older files of the folder.
        self._write(wall_time, session_log={"status": "START"})

    def write_scalars(self, wall_time: float, step: int, values: Mapping[str, float]) -> None:
        scalars = [{"tag": tag, "simple_value": value} for tag, value in values.items()]
        self._write(wall_time, step=step, summary={"value": scalars})

    def write_session_start(self, wall_time: float, hyperparameters: Mapping[str, Scalar]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        summary = hparams_pb(dict(hyperparameters), start_time_secs=wall_time)
        self._write(wall_time, summary=summary)

    def close(self) -> None:
        self._writer.close()

    def _write(self, wall_time: float, **content: Any) -> None:
        event = self._make_event(wall_time=wall_time, **content)
        self._writer.write(event.SerializeToString())
        self._writer.flush()


class TensorBoard:
    """A sink that writes all metrics of a run to TensorBoard."""

    def __init__(
        self, folder: Path, recipe: Recipe, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the event files and write the existing logs of the folder to them."""
        self._clock = clock
        self._last_step = 0
        run = read_run(folder)
        measured_s = sum(_get_wall_s(line) for line in run.timing)
        # Pretend that the logs end now, which preserves the time between their points.
        start_time = clock() - measured_s
        name = f"events.out.tfevents.{clock():.6f}.{socket.gethostname()}.{os.getpid()}{_SUFFIX}"
        self._file, self._session = (
            EventFile(_prepare_folder(folder / subfolder) / name, start_time)
            for subfolder in (FOLDER, SESSION)
        )
        self._session.write_session_start(start_time, collect_hyperparameters(recipe))
        laps = {int(line["steps"]): line for line in run.timing if not line.get("closing")}
        wall_time = start_time
        for line in run.metrics:
            lap = laps.pop(int(line["steps"]), {}) if "eval_return_mean" not in line else {}
            wall_time += _get_wall_s(lap)
            self._write_scalars(wall_time, int(line["steps"]), {**lap, **line})

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._write_scalars(self._clock(), step, metrics)

    def close(self) -> None:
        for file in (self._file, self._session):
            file.close()

    def _write_scalars(self, wall_time: float, step: int, metrics: Mapping[str, Any]) -> None:
        values = {
            make_tag(name): float(value)
            for name, value in metrics.items()
            if name not in _AXIS_NAMES and isinstance(value, int | float)
        }
        if make_tag("loss") in values and make_tag("policy_gradient_loss") not in values:
            # The loss of an algorithm with a single loss is the policy loss.
            values[make_tag("policy_gradient_loss")] = values.pop(make_tag("loss"))
        if _get_wall_s(metrics) > 0.0:
            values[RATE_TAG] = (step - self._last_step) / _get_wall_s(metrics)
            self._last_step = step
        self._file.write_scalars(wall_time, step, values)
        if FINAL_TAG in values:
            self._session.write_scalars(wall_time, step, {FINAL_TAG: values[FINAL_TAG]})


def _prepare_folder(folder: Path) -> Path:
    """Create the folder; remove event files of earlier processes of this run."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
        old.unlink()
    return folder


def make_tag(name: str) -> str:
    """Return the TensorBoard tag of a metric, with its group before the slash."""
    if name in TAGS:
        return TAGS[name]
    if name.startswith("eval_"):
        return f"Evaluation/{name.removeprefix('eval_')}"
    if name.endswith("_s"):
        return f"Time/{name}"
    return f"Loss/{name}" if name.endswith("loss") else f"Info/{name}"


def collect_hyperparameters(recipe: Recipe) -> dict[str, Scalar]:
    """Return the settings of the recipe under dotted names, without unset ones."""
    return {
        name: value if isinstance(value, str | bool | int | float) else str(value)
        for name, value in nested_dict.flatten(recipe.model_dump(mode="json"))
        if value not in (None, {})
    }


def _get_wall_s(line: Line | Mapping[str, Any]) -> float:
    value = line.get("wall_s")
    return float(value) if isinstance(value, int | float) else 0.0
