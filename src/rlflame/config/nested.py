"""Tables within tables, whose values have names with dots.

Must not know: what they hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def get(data: Mapping[str, Any], name: str) -> Any:
    value: Any = data
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def put(data: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        inner = data.get(part)
        if not isinstance(inner, dict):
            inner = data[part] = {}
        data = inner
    data[last] = value


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def named(
    data: Mapping[str, Any], prefix: str = "", whole: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Every value with its name; a table that is empty, or named in `whole`, is a value."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in whole:
            yield from named(value, f"{name}.", whole)
        else:
            yield name, value


def first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first name under which two tables differ, and what each has there."""
    ours, theirs = dict(named(a)), dict(named(b))
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        one, other = ours.get(name, "absent"), theirs.get(name, "absent")
        if one != other:
            return name, one, other
    return None
