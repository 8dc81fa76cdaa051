"""Functions for nested dictionaries, whose values have dotted names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def get_nested(data: Mapping[str, Any], name: str) -> Any:
    value: Any = data
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def set_nested(data: dict[str, Any], name: str, value: Any) -> None:
    """Set a value; do nothing if one of its parents exists and is not a dictionary."""
    *path, last = name.split(".")
    for part in path:
        inner = data.get(part)
        if inner is None:
            inner = data[part] = {}
        if not isinstance(inner, dict):
            return
        data = inner
    data[last] = value


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        are_mappings = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merge(old, value) if are_mappings else value  # type: ignore[arg-type]
    return result


def flatten(
    data: Mapping[str, Any], prefix: str = "", leaves: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf.

    Empty dictionaries, and those named in `leaves`, count as leaves.
    """
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in leaves:
            yield from flatten(value, f"{name}.", leaves)
        else:
            yield name, value


def find_first_difference(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return the first name with different values, and both values."""
    values_a, values_b = dict(flatten(a)), dict(flatten(b))
    for name in values_a | values_b:
        value_a, value_b = values_a.get(name, "absent"), values_b.get(name, "absent")
        if value_a != value_b:
            return name, value_a, value_b
    return None
