"""What may stand in a field of one of the types in `spec`, read from its annotation, once.

Must not know: bytes, JSON.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Check = Callable[[Any], bool]


@cache
def make_field_checks(kind: type) -> dict[str, tuple[Check, type | None]]:
    """Of each field, whether a decoded item can stand in it, and a type whose items all can."""
    hints = typing.get_type_hints(kind)
    return {
        name: (_make_check(hint), hint if hint in (bool, int, float, str) else None)
        for name, hint in hints.items()
    }


def _make_check(hint: Any) -> Check:
    """Whether an item is what a hint says; array dtypes are checked too."""
    origin = typing.get_origin(hint)
    if origin is np.ndarray:
        return _make_array_check(typing.get_args(typing.get_args(hint)[1])[0])
    if origin is NDArray:  # an alias with a name of its own, since numpy 2.5
        return _make_array_check(typing.get_args(hint)[0])
    if origin is typing.Literal:
        words = typing.get_args(hint)
        return lambda item: item in words
    if origin is tuple:
        inner = _make_check(typing.get_args(hint)[0])
        return lambda item: isinstance(item, tuple) and all(map(inner, item))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return lambda item: isinstance(item, dict)
    if origin is not None:
        parts = [_make_check(part) for part in typing.get_args(hint)]
        return lambda item: any(part(item) for part in parts)
    if hint is float:
        return lambda item: isinstance(item, float | int) and not isinstance(item, bool)
    if hint is int:
        return lambda item: isinstance(item, int) and not isinstance(item, bool)
    if hint is Any:
        return lambda item: True
    return lambda item: isinstance(item, hint)


def _make_array_check(scalar: Any) -> Check:
    if scalar is Any:
        return lambda item: isinstance(item, np.ndarray)
    dtype = np.dtype(scalar)
    return lambda item: isinstance(item, np.ndarray) and item.dtype == dtype
