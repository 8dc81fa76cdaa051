"""Reads run folders for plots, reports and listings, and never writes to them.

A damaged metrics.jsonl, episodes.csv or result.json raises an error that names the file, because
results depend on these files. Damage to timing.jsonl and machines.json is ignored. A value that has
an unexpected type, or is too large to be averaged, counts as missing.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from rlflame.config import nested_dict, regular_file, toml_io
from rlflame.config.algorithms import TRAITS
from rlflame.config.flags import DEFAULT_ALGORITHM
from rlflame.config.recipe import make_defaults
from rlflame.errors import CheckpointError, ConfigError, format_command
from rlflame.rollout.task import Float64
from rlflame.storage.sweep_folder import is_sweep, list_seed_runs

Line = dict[str, Any]
#: The limit for counts, such as steps and bytes, which are 64-bit integers.
MAX_COUNT = 2**63
Count = Annotated[int, Field(strict=True, ge=0, lt=MAX_COUNT)]
#: The limit for other numbers, so that the sum of the squares of all returns is finite.
_MAX_VALUE = 1e140
Number = (
    Annotated[int, Field(strict=True, gt=-MAX_COUNT, lt=MAX_COUNT)]
    | Annotated[float, Field(strict=True, ge=-_MAX_VALUE, le=_MAX_VALUE)]
)
#: Printable text on one line.
Text = Annotated[str, Field(strict=True, pattern=r"^( |[^\p{C}\p{Z}])*$")]


def _validate_or_drop(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


_OR_NONE = WrapValidator(_validate_or_drop)
_MaybeCount = Annotated[Count | None, _OR_NONE]


class _Numbers(BaseModel):
    """A JSON object of which only the numbers are kept."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Number | None, _OR_NONE]]


class _Record(_Numbers):
    steps: Count


class _Evaluation(_Numbers):
    mean: Number


class _Result(BaseModel):
    steps: Count
    evaluation: _Evaluation


class _Facts(BaseModel):
    """A description of a process, machine or worker, with texts and counts."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Text | None, _OR_NONE]]

    steps: _MaybeCount = None
    capacity: _MaybeCount = None
    cores: _MaybeCount = None
    usable_cores: _MaybeCount = None
    memory_bytes: _MaybeCount = None
    number: _MaybeCount = None
    packages: Annotated[_Facts | None, _OR_NONE] = None
    machine: Annotated[_Facts | None, _OR_NONE] = None
    workers: Annotated[list[_Facts] | None, _OR_NONE] = None


_MACHINES = TypeAdapter(list[Annotated[_Facts | None, _OR_NONE]])


class _EnvironmentHead(BaseModel):
    id: Text = "?"


class _LearningHead(BaseModel):
    """The settings that identify a run. Other settings are not validated."""

    seed: Count = 0
    algorithm: Text = DEFAULT_ALGORITHM
    environment: _EnvironmentHead = _EnvironmentHead()


@dataclass(frozen=True)
class RunData:
    """The content of a run folder. Incomplete last lines of logs are left out."""

    folder: Path
    config: dict[str, Any]
    algorithm: str
    environment: str
    seed: int
    metrics: tuple[Line, ...]
    timing: tuple[Line, ...]
    #: One entry for each process that trained here, in order.
    machines: tuple[Line, ...]
    #: The final evaluation and the number of steps before it; None if it is missing.
    result: Line | None

    @property
    def counts_iterations(self) -> bool:
        """Whether progress is counted in iterations instead of steps."""
        traits = TRAITS.get(self.algorithm)
        return traits is not None and traits.counts_iterations

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """All settings except the runtime, with defaults for missing settings."""
        settings = {key: value for key, value in self.config.items() if key != "runtime"}
        return nested_dict.merge(make_defaults(self.algorithm), settings)

    @property
    def runtime(self) -> dict[str, Any]:
        settings = self.config.get("runtime")
        return settings if isinstance(settings, dict) else {}

    def get_runtime_count(self, setting: str) -> int:
        """Return a positive count from the runtime settings, or 0 if it is missing."""
        value = self.runtime.get(setting)
        return value if type(value) is int and value > 0 else 0

    @property
    def init_policy(self) -> str | None:
        """The ID of the policy that the run started from, or None for new weights."""
        policy_hash = nested_dict.get_nested(self.config, "learning.init_policy")
        return policy_hash if isinstance(policy_hash, str) else None

    @property
    def evaluation(self) -> Line | None:
        """The final evaluation; None if it is missing or the run has continued."""
        if self.result is None or self.result["steps"] < self.steps:
            return None
        evaluation: Line = self.result["evaluation"]
        return evaluation

    @property
    def steps(self) -> int:
        return max((int(line["steps"]) for line in self.metrics), default=0)

    def read_values(self, metric: str) -> tuple[Float64, Float64]:
        """Return the steps at which a metric was measured, and its values."""
        points = [(line["steps"], line[metric]) for line in self.metrics if metric in line]
        table = np.array(points, np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def read_episodes(self) -> tuple[Float64, Float64]:
        """Read the returns and lengths of all training episodes, in log order."""
        path = self.folder / "episodes.csv"
        rows: list[tuple[float, float]] = []
        try:
            with _report_read_errors(path):
                lines = regular_file.read_lines(path, newline="")
                complete_lines = (line for line in lines if line.endswith("\n"))
                rows += (
                    (float(row["r"]), float(row["l"])) for row in csv.DictReader(complete_lines)
                )
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            reason = "not all of its lines have a return and a length"
            raise _make_damage_error(path, reason) from error
        table = np.array(rows, np.float64).reshape(-1, 2)
        table = table[(np.abs(table) <= _MAX_VALUE).all(axis=1)]  # also drops NaN
        return table[:, 0], table[:, 1]

    def compute_elapsed_s(self, *names: str) -> tuple[Float64, Float64] | None:
        """Return the steps and the cumulative sum of the named times, in seconds.

        Returns None if a time is missing. Work that was repeated after a crash counts once.
        """
        seconds_by_step: dict[int, float] = {}
        for line in self.timing:
            steps = int(line["steps"])
            if not all(name in line for name in names):
                return None
            seconds = sum(line[name] for name in names)
            if line.get("closing") and steps in seconds_by_step:
                seconds_by_step[steps] += seconds
                continue
            for stale_step in [s for s in reversed(seconds_by_step) if s >= steps]:
                del seconds_by_step[stale_step]
            seconds_by_step[steps] = seconds
        if not seconds_by_step:
            return None
        return np.array([*seconds_by_step], np.float64), np.cumsum(
            [*seconds_by_step.values()], dtype=np.float64
        )


def read_run(folder: Path) -> RunData:
    """Read a run folder; raise CheckpointError if it is missing or damaged."""
    config = folder / "config.toml"
    if not config.is_file():
        raise CheckpointError(
            f"{folder} {'is not a run folder' if folder.exists() else 'does not exist'}.",
            "rlflame runs lists the runs here",
        )
    try:
        tables = toml_io.read_file(config)
        learning = _LearningHead.model_validate(tables.get("learning"))
    except ConfigError as error:
        raise CheckpointError(error.message, "restore it from a copy") from error
    except ValidationError as error:
        message = f"{config} is not the config of a run."
        raise CheckpointError(message, "restore it from a copy") from error
    return RunData(
        folder=folder,
        config=tables,
        algorithm=learning.algorithm,
        environment=learning.environment.id,
        seed=learning.seed,
        metrics=read_lines(folder / "metrics.jsonl"),
        timing=read_lines(folder / "timing.jsonl", strict=False),
        machines=read_machines(folder / "machines.json"),
        result=read_result(folder / "result.json"),
    )


def read_runs(paths: list[Path]) -> tuple[list[RunData], list[str]]:
    """Read runs and folders of runs; return the runs and notes about skipped ones.

    A run in `paths` must be readable. In a folder of runs, unreadable runs are skipped.
    """
    runs, notes = [], []
    for path in paths:
        run_folders = [] if (path / "config.toml").exists() else _find_runs(path)
        if not run_folders:
            runs.append(read_run(path))
        for folder in run_folders:
            try:
                run = read_run(folder)
            except CheckpointError as error:
                notes.append(f"{error.message} This run is skipped.")
                continue
            if run.metrics:
                runs.append(run)
            else:
                notes.append(f"{folder} has no metrics yet and is skipped.")
    if paths and not runs:
        names = ", ".join(map(str, paths))
        raise CheckpointError(
            " ".join([f"There is no run with metrics in {names}.", *notes]),
            "rlflame runs lists the runs here",
        )
    unique = {run.folder.resolve(): run for run in runs}
    return [*unique.values()], notes


def _find_runs(folder: Path) -> list[Path]:
    """List the runs in a folder, including those of its sweeps."""
    if is_sweep(folder):
        return [run for run in list_seed_runs(folder) if (run / "config.toml").is_file()]
    try:
        run_folders = sorted(config.parent for config in folder.glob("*/config.toml"))
        sweeps = [inner for inner in sorted(folder.glob("*")) if is_sweep(inner)]
    except OSError:
        return []
    return [*run_folders, *(run for sweep in sweeps for run in _find_runs(sweep))]


@contextlib.contextmanager
def _report_read_errors(path: Path) -> Iterator[None]:
    """Convert read errors to CheckpointError; ignore a missing file."""
    try:
        yield
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise CheckpointError(
            f"{path} cannot be read: {reason or error}.",
            "restore it from a copy, or check its permissions",
        ) from error


def read_text(path: Path) -> str:
    """Read a whole file; return an empty string if it is missing."""
    with _report_read_errors(path):
        return regular_file.read_text(path, regular_file.RECORD_BYTES)
    return ""


def read_lines(path: Path, *, strict: bool = True) -> tuple[Line, ...]:
    """Read the complete lines of a JSONL file; return () if the file is missing.

    If `strict` is False, damaged lines are skipped. Some logs are never truncated, so a crash may
    have left half a line in them.
    """
    records: list[Line] = []
    with _report_read_errors(path) if strict else contextlib.suppress(OSError, UnicodeDecodeError):
        for number, content in enumerate(regular_file.read_lines(path), 1):
            try:
                if content.endswith("\n"):
                    records.append(parse_line(content))
            except ValueError as error:
                if strict:
                    reason = f"line {number} is not a line of a run's log"
                    raise _make_damage_error(path, reason) from error
    return tuple(records)


def parse_line(content: str | bytes) -> Line:
    """Parse the numbers in a line; raise ValueError if `steps` is missing."""
    return _Record.model_validate_json(content).model_dump(exclude_none=True)


def read_result(path: Path) -> Line | None:
    """Read result.json; return None if the file is missing."""
    if not (content := read_text(path)):
        return None
    try:
        return _Result.model_validate_json(content).model_dump(exclude_none=True)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: it does not contain a final evaluation.",
            f"remove it, then: {format_command('resume', path.parent)}",
        ) from error


def read_machines(path: Path) -> tuple[Line, ...]:
    """Read the descriptions of all processes that trained in the folder."""
    try:
        entries = _MACHINES.validate_json(read_text(path) or "[]")
    except (ValueError, CheckpointError):
        return ()
    return tuple(entry.model_dump(exclude_none=True) if entry else {} for entry in entries)


def _make_damage_error(path: Path, reason: str) -> CheckpointError:
    """Make an error that suggests a command to rewind the logs or train again."""
    checkpoints = sorted((path.parent / "checkpoints").glob("step-*.safetensors"))
    hint = format_command("train", "--config", path.parent / "config.toml")
    if checkpoints:
        hint = f"rewind the logs: {format_command('resume', checkpoints[0])}"
    return CheckpointError(f"{path} is damaged: {reason}.", hint)
