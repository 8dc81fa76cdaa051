"""Values from a run's files. A value of another type than expected counts as absent.

A damaged record or final evaluation is refused by name, because numbers are made of it. Clocks and
machines that cannot be read are unknown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from rlflame.config import regular_file
from rlflame.errors import CheckpointError, format_command

Line = dict[str, Any]
#: Steps and bytes are counted in 64 bits.
MAX_COUNT = 2**63
Count = Annotated[int, Field(strict=True, ge=0, lt=MAX_COUNT)]
Number = (
    Annotated[int, Field(strict=True, gt=-MAX_COUNT, lt=MAX_COUNT)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
)
#: Printable as one line.
Text = Annotated[str, Field(strict=True, pattern=r"^( |[^\p{C}\p{Z}])*$")]


def _replace_invalid_by(default: Any) -> WrapValidator:
    """What stands for a value of another type."""

    def validate_or_replace(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            return default

    return WrapValidator(validate_or_replace)


_OrNone = _replace_invalid_by(None)
_MaybeCount = Annotated[Count | None, _OrNone]
_Numbers = dict[str, Annotated[Number | None, _OrNone]]


class _Facts(BaseModel):
    """Facts are text, but for those that count something."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Text | None, _OrNone]]

    steps: _MaybeCount = None
    capacity: _MaybeCount = None
    cores: _MaybeCount = None
    usable_cores: _MaybeCount = None
    memory_bytes: _MaybeCount = None
    number: _MaybeCount = None


class _Machine(_Facts):
    packages: Annotated[_Facts, _replace_invalid_by(_Facts())] = _Facts()


class _TrainingProcess(_Facts):
    machine: Annotated[_Machine, _replace_invalid_by(_Machine())] = _Machine()
    workers: Annotated[
        list[Annotated[_Facts, _replace_invalid_by(_Facts())]], _replace_invalid_by([])
    ] = []


class _Result(BaseModel):
    steps: Count
    evaluation: _Numbers


_NUMBERS, _RESULT = TypeAdapter(_Numbers), TypeAdapter(_Result)
_COUNT, _NUMBER = TypeAdapter[int](Count), TypeAdapter[float](Number)
_MACHINES = TypeAdapter(list[Annotated[_TrainingProcess, _replace_invalid_by(_TrainingProcess())]])


def read_text(path: Path) -> str:
    """All of a file; nothing where there is none."""
    with _report_read_errors(path):
        return regular_file.read_text(path, regular_file.RECORD_BYTES)
    return ""


def _read_complete_lines(path: Path) -> Iterator[str]:
    """The lines of a file without their ends, but for a last one that has none yet."""
    with _report_read_errors(path):
        for line in regular_file.read_lines(path):
            if line.endswith("\n"):
                yield line[:-1]


@contextlib.contextmanager
def _report_read_errors(path: Path) -> Iterator[None]:
    """A CheckpointError for a file that cannot be read; an absent one reads as empty."""
    try:
        yield
    except FileNotFoundError:
        pass
    except (regular_file.TooLargeError, UnicodeDecodeError) as error:
        reason = "it is not text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise CheckpointError(
            f"{path} is damaged: {reason}.", format_rebuild_hint(path.parent)
        ) from error
    except OSError as error:
        wrong_kind = isinstance(error, regular_file.NotRegularError | IsADirectoryError)
        hint = "put the run's file back in its place" if wrong_kind else "check its permissions"
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.", hint) from error


def format_rebuild_hint(run: Path, valid_steps: int = 0) -> str:
    """The command that makes a damaged record again, with equal bits: resume from a checkpoint of
    the first `valid_steps` steps, whose record is good, or train again."""
    earlier = [
        file
        for file in sorted(run.glob("checkpoints/step-*.safetensors"))
        if file.stem[5:].isdigit() and (int(file.stem[5:]) < valid_steps or not int(file.stem[5:]))
    ]
    words = ("resume", earlier[-1]) if earlier else ("train", "--config", run / "config.toml")
    return f"to the same bits again: {format_command(*words)}"


def read_lines(path: Path) -> tuple[Line, ...]:
    """The whole lines of a JSONL file, each with its steps; none where there is no file."""
    records: list[Line] = []
    for number, content in enumerate(_read_complete_lines(path), 1):
        try:
            records.append(parse_line(content))
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged: line {number} is not one of a run's.",
                format_rebuild_hint(
                    path.parent, max((line["steps"] for line in records), default=0)
                ),
            ) from error
    return tuple(records)


def read_valid_lines(path: Path) -> tuple[Line, ...]:
    """The same of a file that is never truncated, where a crash may have left half a line; numbers
    that no clock has counted are left out."""
    records: list[Line] = []
    with contextlib.suppress(CheckpointError):
        for content in _read_complete_lines(path):
            with contextlib.suppress(ValueError):
                line = parse_line(content)
                records.append({name: n for name, n in line.items() if abs(n) < MAX_COUNT})
    return tuple(records)


def parse_line(content: str | bytes) -> Line:
    """The numbers of a line, the steps among them; a ValueError for anything else."""
    line = _NUMBERS.validate_json(content)
    _COUNT.validate_python(line.get("steps"))
    return _drop_absent(line)


def read_result(path: Path) -> Line | None:
    """The steps and the numbers of the final evaluation, which has a mean at least."""
    content = read_text(path)
    if not content:
        return None
    try:
        result = _RESULT.validate_json(content)
        _NUMBER.validate_python(result.evaluation.get("mean"))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: it is not a final evaluation.",
            f"remove it, then: {format_command('resume', path.parent)}",
        ) from error
    return {"steps": result.steps, "evaluation": _drop_absent(result.evaluation)}


def _drop_absent(numbers: _Numbers) -> Line:
    return {name: number for name, number in numbers.items() if number is not None}


def read_machines(path: Path) -> tuple[Line, ...]:
    """The processes that trained in the folder, each with what is known of it."""
    try:
        entries = _MACHINES.validate_json(read_text(path) or "[]")
    except (ValueError, CheckpointError):
        return ()
    return tuple(entry.model_dump(exclude_none=True) for entry in entries)
