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
from rlflame.errors import CheckpointError, typed

Line = dict[str, Any]
#: Steps and bytes are counted in 64 bits.
_MOST = 2**63
_COUNTED = ("steps", "capacity", "cores", "usable_cores", "memory_bytes", "number")


def text(path: Path) -> str:
    """All of a file; nothing where there is none."""
    with _sentences(path):
        return regular_file.read_text(path, regular_file.RECORD_BYTES)
    return ""


def _whole_lines(path: Path) -> Iterator[str]:
    """The lines of a file without their ends, but for a last one that has none yet."""
    with _sentences(path):
        for line in regular_file.read_lines(path):
            if line.endswith("\n"):
                yield line[:-1]


@contextlib.contextmanager
def _sentences(path: Path) -> Iterator[None]:
    """A CheckpointError for a file that cannot be read; an absent one reads as empty."""
    try:
        yield
    except FileNotFoundError:
        pass
    except regular_file.TooLargeError as error:
        raise CheckpointError(
            f"{path} is damaged: {error.strerror}.", remade(path.parent)
        ) from error
    except OSError as error:
        other = isinstance(error, regular_file.NotRegularError | IsADirectoryError)
        hint = "put the run's file back in its place" if other else "check its permissions"
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.", hint) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: it is not text.", remade(path.parent)) from error


def remade(run: Path, whole: int = 0) -> str:
    """What makes a damaged record anew, of which what came before so many steps is good: the run
    taken up from a checkpoint of that time, or trained again, to the same bits either way."""
    earlier = [
        file
        for file in sorted(run.glob("checkpoints/step-*.safetensors"))
        if file.stem[5:].isdigit() and (int(file.stem[5:]) < whole or not int(file.stem[5:]))
    ]
    if earlier:
        return f"to the same bits again: {typed('resume', earlier[-1])}"
    return f"to the same bits again: {typed('train', '--config', run / 'config.toml')}"


def value(written: str) -> Any:
    """A JSON value; a ValueError where it is none, or deeper than can be read."""
    try:
        return json.loads(written)
    except RecursionError as error:
        raise ValueError("too deep") from error


def lines(path: Path) -> tuple[Line, ...]:
    """The whole lines of a JSONL file, each with its steps; none where there is no file."""
    found: list[Line] = []
    for number, written in enumerate(_whole_lines(path), 1):
        try:
            found.append(_measured(value(written)))
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged: line {number} is not one of a run's.",
                remade(path.parent, max((line["steps"] for line in found), default=0)),
            ) from error
    return tuple(found)


def readable_lines(path: Path) -> tuple[Line, ...]:
    """The same of a file that nothing is cut from, where a crash may have left half a line; what
    no clock has counted is left out of a line."""
    found: list[Line] = []
    with contextlib.suppress(CheckpointError):
        for written in _whole_lines(path):
            with contextlib.suppress(ValueError):
                line = _measured(value(written))
                found.append({name: n for name, n in line.items() if abs(n) < _MOST})
    return tuple(found)


def result(path: Path) -> Line | None:
    """`steps` and `evaluation` of a final evaluation, which has a mean at least."""
    written = text(path)
    if not written:
        return None
    try:
        found = value(written)
        evaluation = found.get("evaluation") if isinstance(found, dict) else None
        if not isinstance(evaluation, dict) or not is_number(evaluation.get("mean")):
            raise ValueError("no mean")
        if not is_count(found.get("steps")):
            raise ValueError("no steps")
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: it is not a final evaluation.",
            f"remove it, then: {typed('resume', path.parent)}",
        ) from error
    return {"steps": found["steps"], "evaluation": _numbers(evaluation)}


def machines(path: Path) -> tuple[Line, ...]:
    """The processes that trained somewhere, each with what is known of it."""
    try:
        found = value(text(path) or "[]")
    except (ValueError, CheckpointError):
        return ()
    return tuple(map(_entry, _list(found)))


def _entry(found: Any) -> Line:
    entry = _table(found)
    machine = _table(entry.get("machine"))
    return {
        **_facts(entry),
        "machine": {**_facts(machine), "packages": _facts(machine.get("packages"))},
        "workers": [_facts(worker) for worker in _list(entry.get("workers"))],
    }


def _facts(found: Any) -> Line:
    """Words, and numbers of what is counted."""
    return {
        name: fact
        for name, fact in _table(found).items()
        if (is_count if name in _COUNTED else is_text)(fact)
    }


def _table(found: Any) -> Line:
    return found if isinstance(found, dict) else {}


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def is_number(found: Any) -> TypeGuard[int | float]:
    """Neither NaN, nor beyond what a float can be."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    try:
        return math.isfinite(found)
    except OverflowError:
        return False


def is_text(found: Any) -> TypeGuard[str]:
    return isinstance(found, str) and found.isprintable()


def is_count(found: Any) -> TypeGuard[int]:
    return isinstance(found, int) and not isinstance(found, bool) and 0 <= found < _MOST


def _measured(line: Any) -> Line:
    """The numbers of a line, and how many steps there were."""
    if not isinstance(line, dict) or not is_count(line.get("steps")):
        raise ValueError("no steps")
    return _numbers(line)


def _numbers(table: Mapping[str, Any]) -> Line:
    return {name: number for name, number in table.items() if is_number(number)}
