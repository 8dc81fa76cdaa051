"""Converts between the values of an environment's spaces and flat rows of numbers.

Observations have the layout of Gymnasium's `flatten_space`: the numbers of a Box, a 0 or 1 for each
value of a choice, and the parts of a Dict or Tuple one after the other. A row of actions has one
number for each choice (its index) and for each element of a Box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .task import Array, EnvSpec, Float32, SpaceLeaf

#: The entry of `info`, or of a Dict observation, with the action mask.
MASK_NAME = "action_mask"


class SpaceError(ValueError):
    """Raised if a value does not belong to its space."""


def format_path(path: Sequence[str | int]) -> str:
    return "/".join(map(str, path))


def is_image(leaf: SpaceLeaf) -> bool:
    return leaf.kind == "box" and leaf.dtype == "uint8" and len(leaf.shape) >= 2


def count_observations(leaf: SpaceLeaf) -> int:
    """Return the number of observations that encode a leaf."""
    return sum(leaf.counts) or math.prod(leaf.shape)


def list_counts(leaf: SpaceLeaf) -> list[int]:
    """Return the number of values of each action of a leaf, or 0 for a number."""
    if leaf.kind == "multi_binary":
        return [2] * math.prod(leaf.shape)
    return list(leaf.counts) or [0] * math.prod(leaf.shape)


def find_choice_spans(leaves: Sequence[SpaceLeaf]) -> tuple[tuple[int, int], ...]:
    """Return the spans of observations that encode choices; adjacent spans are merged."""
    spans: list[tuple[int, int]] = []
    start = 0
    for leaf in leaves:
        end = start + count_observations(leaf)
        if leaf.kind != "box":
            first = spans.pop()[0] if spans and spans[-1][1] == start else start
            spans.append((first, end))
        start = end
    return tuple(spans)


def list_action_leaves(env: EnvSpec) -> tuple[SpaceLeaf, ...]:
    """Return the leaves of the action space."""
    if env.action_leaves:
        return env.action_leaves
    if env.action_kind == "discrete":
        return (SpaceLeaf((), "discrete", "int64", (), (env.action_size,), (env.action_start,)),)
    shape = (env.action_size,) if env.action_shape is None else env.action_shape
    return (SpaceLeaf((), "box", "float32", shape),)


def get_part(value: Any, path: Sequence[str | int]) -> Any:
    """Return the part of a Dict or Tuple value at a path."""
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError) as error:
        raise SpaceError(f"that has no part {format_path(path)!r}") from error
    return value


class ObservationEncoder:
    """Writes the observations of an environment to rows."""

    def __init__(self, leaves: Sequence[SpaceLeaf]) -> None:
        self._leaves = leaves
        self._offsets: list[tuple[slice, Array]] = []
        start = 0
        for leaf in leaves:
            end = start + count_observations(leaf)
            # The place of the first value of each choice.
            firsts = np.cumsum([0, *leaf.counts[:-1]]) if leaf.counts else np.zeros(0, np.int64)
            self._offsets.append((slice(start, end), firsts))
            start = end
        self._sizes = [np.array(leaf.counts, np.int64) for leaf in leaves]
        self._starts = [np.array(leaf.starts, np.int64) for leaf in leaves]

    def write(self, observation: Any, out: Float32) -> None:
        """Write an observation.

        If it does not belong to its space, raise a SpaceError whose text follows its name.
        """
        for number, leaf in enumerate(self._leaves):
            part = np.asarray(get_part(observation, leaf.path))
            if part.shape != leaf.shape:
                raise SpaceError(
                    f"{_format_subject(leaf)} has the shape {part.shape}, but its space has the "
                    f"shape {leaf.shape}"
                )
            span, firsts = self._offsets[number]
            if not leaf.counts:
                out[span] = part.reshape(-1)
                continue
            values = _read_integers(part.reshape(-1), leaf)
            choices = values - self._starts[number]
            is_outside = (choices < 0) | (choices >= self._sizes[number])
            if is_outside.any():
                value = int(values[is_outside][0])
                raise SpaceError(f"{_format_subject(leaf)} contains {value}, outside its space")
            columns = out[span]
            columns[...] = 0.0
            columns[firsts + choices] = 1.0


def _read_integers(numbers: Array, leaf: SpaceLeaf) -> Array:
    if numbers.dtype.kind in "biu":
        return numbers.astype(np.int64)
    if numbers.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            values = numbers.astype(np.int64)
        if (values == numbers).all():
            return values
    raise SpaceError(f"{_format_subject(leaf)} contains {numbers[0]!r}, but its space has integers")


def _format_subject(leaf: SpaceLeaf) -> str:
    return f"whose part {format_path(leaf.path)!r}" if leaf.path else "that"


class ActionDecoder:
    """Converts rows of actions to values that have exactly the type of the action space."""

    def __init__(self, env: EnvSpec) -> None:
        leaves = list_action_leaves(env)
        self._paths = [leaf.path for leaf in leaves]
        self._decoders: list[Callable[[Any], Any]] = []
        self._spans: list[slice] = []
        start = 0
        for leaf in leaves:
            end = start + len(list_counts(leaf))
            bounds = env.action_low[start:end], env.action_high[start:end]
            self._decoders.append(_make_decoder(leaf, *bounds))
            self._spans.append(slice(start, end))
            start = end
        self._is_single = self._paths == [()]
        #: Whether a row is a number. If not, it is an array.
        self._is_number = env.action_kind == "discrete"
        #: Whether rows already are actions.
        self._is_identity = self._is_number and leaves == (
            SpaceLeaf((), "discrete", "int64", (), (env.action_size,), (0,)),
        )

    def decode(self, row: Any) -> Any:
        """Return the action of a row. For a single choice, the row is an `np.int64`."""
        if self._is_identity:
            return row
        columns = [row] if self._is_number else row
        if self._is_single:
            return self._decoders[0](columns)
        values = [
            decode(columns[span]) for decode, span in zip(self._decoders, self._spans, strict=True)
        ]
        return _build_tree(list(zip(self._paths, values, strict=True)))


def _make_decoder(
    leaf: SpaceLeaf, low: Sequence[float], high: Sequence[float]
) -> Callable[[Any], Any]:
    dtype = np.dtype(leaf.dtype)
    if leaf.kind == "discrete":
        start, scalar = leaf.starts[0], dtype.type
        return lambda row: scalar(int(row[0]) + start)
    if leaf.kind != "box":
        starts = np.array(leaf.starts or 0, np.int64)
        return lambda row: (np.asarray(row, np.int64) + starts).astype(dtype).reshape(leaf.shape)
    if dtype == np.float32:
        if len(leaf.shape) == 1:
            return lambda row: row
        return lambda row: row.reshape(leaf.shape)
    lows, highs = _make_bounds(dtype, low), _make_bounds(dtype, high)
    if dtype.kind == "f":
        # In a wider type, the nearest float32 of a bound may lie outside the bounds.
        return lambda row: np.clip(row.astype(dtype), lows, highs).reshape(leaf.shape)
    return lambda row: (
        np.clip(np.rint(row.astype(np.float64)), lows, highs).astype(dtype).reshape(leaf.shape)
    )


def _make_bounds(dtype: np.dtype[Any], bounds: Sequence[float]) -> Array:
    """Return bounds that can be compared with a Box's numbers without overflow."""
    if dtype.kind == "f":
        return np.array(bounds, dtype)
    if dtype.kind == "b":
        return np.array(bounds, np.float64)
    limits = np.iinfo(dtype)
    # float64 cannot represent the largest 64-bit integer, and rounds it up.
    top = float(limits.max)
    top = top if top <= limits.max else math.nextafter(top, 0.0)
    return np.clip(np.array(bounds, np.float64), float(limits.min), top)


def _build_tree(items: Sequence[tuple[tuple[str | int, ...], Any]]) -> Any:
    """Return the dicts and tuples that contain values at paths."""
    if items[0][0] == ():
        return items[0][1]
    groups: dict[str | int, list[tuple[tuple[str | int, ...], Any]]] = {}
    for path, value in items:
        groups.setdefault(path[0], []).append((path[1:], value))
    parts = {key: _build_tree(group) for key, group in groups.items()}
    return tuple(parts.values()) if isinstance(items[0][0][0], int) else parts


class MaskEncoder:
    """Writes the action masks of an environment to rows."""

    def __init__(self, env: EnvSpec) -> None:
        self._leaves = [leaf for leaf in list_action_leaves(env) if any(list_counts(leaf))]
        self._counts = [count for leaf in self._leaves for count in list_counts(leaf)]
        self._firsts = np.cumsum([0, *self._counts[:-1]])
        self._size = env.mask_size

    def write(self, mask: Any, out: Float32) -> None:
        """Write a mask; raise SpaceError if it does not fit, or allows no action.

        A mask is one array for all choices, or has the form of the action space.
        """
        numbers = np.concatenate([np.ravel(part) for part in self._iterate_parts(mask)])
        if len(numbers) != self._size:
            raise SpaceError(
                f"gave an action mask of {len(numbers)} numbers, but its actions have "
                f"{self._size} choices"
            )
        if numbers.dtype.kind not in "biuf" or not np.isin(numbers, (0, 1)).all():
            raise SpaceError("gave an action mask with values other than 0 and 1")
        out[...] = numbers
        totals = np.add.reduceat(out, self._firsts)
        if not totals.all():
            number = int(totals.argmin())
            place = f" for action {number}" if len(self._counts) > 1 else ""
            raise SpaceError(f"gave an action mask that allows no choice{place}")

    def _iterate_parts(self, mask: Any) -> Iterator[Any]:
        if isinstance(mask, dict) or (isinstance(mask, tuple | list) and self._leaves[0].path):
            for leaf in self._leaves:
                yield from _iterate_arrays(get_part(mask, leaf.path))
        else:
            yield from _iterate_arrays(mask)


def _iterate_arrays(mask: Any) -> Iterator[Any]:
    """Yield the arrays of a mask for several choices, which may be a tuple of arrays."""
    if isinstance(mask, tuple):
        for part in mask:
            yield from _iterate_arrays(part)
    else:
        yield np.asarray(mask)
