"""What a run's files say, whatever they hold: what is not of its type is as good as absent.

What counts is refused by name where it is damaged: the record and the final evaluation. What stands
beside the point, clocks and machines, is unknown where it cannot be read. Must not know: what is
made of it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from rlflame.config import regular_file
from rlflame.errors import CheckpointError, format_command

Line = dict[str, Any]
#: Steps and bytes are counted in 64 bits.
_MAX_COUNT = 2**63
_COUNT_FIELDS = ("steps", "capacity", "cores", "usable_cores", "memory_bytes", "number")


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
    except regular_file.TooLargeError as error:
        raise CheckpointError(
            f"{path} is damaged: {error.strerror}.", format_rebuild_hint(path.parent)
        ) from error
    except OSError as error:
        wrong_kind = isinstance(error, regular_file.NotRegularError | IsADirectoryError)
        hint = "put the run's file back in its place" if wrong_kind else "check its permissions"
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.", hint) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is damaged: it is not text.", format_rebuild_hint(path.parent)
        ) from error


def format_rebuild_hint(run: Path, valid_steps: int = 0) -> str:
    """What makes a damaged record anew, of which what came before so many steps is good: the run
    taken up from a checkpoint of that time, or trained again, to the same bits either way."""
    earlier = [
        file
        for file in sorted(run.glob("checkpoints/step-*.safetensors"))
        if file.stem[5:].isdigit() and (int(file.stem[5:]) < valid_steps or not int(file.stem[5:]))
    ]
    if earlier:
        return f"to the same bits again: {format_command('resume', earlier[-1])}"
    return f"to the same bits again: {format_command('train', '--config', run / 'config.toml')}"


def parse_json(content: str) -> Any:
    """A JSON value; a ValueError where it is none, or deeper than can be read."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("too deep") from error


def read_lines(path: Path) -> tuple[Line, ...]:
    """The whole lines of a JSONL file, each with its steps; none where there is no file."""
    records: list[Line] = []
    for number, content in enumerate(_read_complete_lines(path), 1):
        try:
            records.append(_parse_line(parse_json(content)))
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged: line {number} is not one of a run's.",
                format_rebuild_hint(
                    path.parent, max((line["steps"] for line in records), default=0)
                ),
            ) from error
    return tuple(records)


def read_valid_lines(path: Path) -> tuple[Line, ...]:
    """The same of a file that nothing is cut from, where a crash may have left half a line; what
    no clock has counted is left out of a line."""
    records: list[Line] = []
    with contextlib.suppress(CheckpointError):
        for content in _read_complete_lines(path):
            with contextlib.suppress(ValueError):
                line = _parse_line(parse_json(content))
                records.append({name: n for name, n in line.items() if abs(n) < _MAX_COUNT})
    return tuple(records)


def read_result(path: Path) -> Line | None:
    """`steps` and `show_evaluation` of a final evaluation, which has a mean at least."""
    content = read_text(path)
    if not content:
        return None
    try:
        data = parse_json(content)
        evaluation = data.get("evaluation") if isinstance(data, dict) else None
        if not isinstance(evaluation, dict) or not is_number(evaluation.get("mean")):
            raise ValueError("no mean")
        if not is_count(data.get("steps")):
            raise ValueError("no steps")
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: it is not a final evaluation.",
            f"remove it, then: {format_command('resume', path.parent)}",
        ) from error
    return {"steps": data["steps"], "evaluation": _select_numbers(evaluation)}


def read_machines(path: Path) -> tuple[Line, ...]:
    """The processes that trained somewhere, each with what is known of it."""
    try:
        data = parse_json(read_text(path) or "[]")
    except (ValueError, CheckpointError):
        return ()
    return tuple(map(_parse_entry, _as_list(data)))


def _parse_entry(data: Any) -> Line:
    entry = _as_dict(data)
    machine = _as_dict(entry.get("machine"))
    return {
        **_parse_facts(entry),
        "machine": {**_parse_facts(machine), "packages": _parse_facts(machine.get("packages"))},
        "workers": [_parse_facts(worker) for worker in _as_list(entry.get("workers"))],
    }


def _parse_facts(data: Any) -> Line:
    """Words, and numbers of what is counted."""
    return {
        name: fact
        for name, fact in _as_dict(data).items()
        if (is_count if name in _COUNT_FIELDS else is_text)(fact)
    }


def _as_dict(data: Any) -> Line:
    return data if isinstance(data, dict) else {}


def _as_list(data: Any) -> list[Any]:
    return data if isinstance(data, list) else []


def is_number(candidate: Any) -> TypeGuard[int | float]:
    """Neither NaN, nor beyond what a float can be."""
    if isinstance(candidate, bool) or not isinstance(candidate, int | float):
        return False
    try:
        return math.isfinite(candidate)
    except OverflowError:
        return False


def is_text(candidate: Any) -> TypeGuard[str]:
    return isinstance(candidate, str) and candidate.isprintable()


def is_count(candidate: Any) -> TypeGuard[int]:
    return (
        isinstance(candidate, int)
        and not isinstance(candidate, bool)
        and 0 <= candidate < _MAX_COUNT
    )


def _parse_line(line: Any) -> Line:
    """The numbers of a line, and how many steps there were."""
    if not isinstance(line, dict) or not is_count(line.get("steps")):
        raise ValueError("no steps")
    return _select_numbers(line)


def _select_numbers(table: Mapping[str, Any]) -> Line:
    return {name: number for name, number in table.items() if is_number(number)}
