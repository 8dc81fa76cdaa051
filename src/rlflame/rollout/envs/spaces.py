"""Reads the spaces of Gymnasium environments, and finds out how they mask actions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
from gymnasium import spaces

from ..space_codec import (
    MASK_NAME,
    SpaceError,
    count_observations,
    format_path,
    is_image,
    list_counts,
)
from ..task import ActionKind, MaskSource, SpaceLeaf

MASK_METHOD = "action_masks"
#: Larger images are refused, because a perceptron has a weight for each number and unit.
MAX_IMAGE_SIZE = 10_000
Path = tuple[str | int, ...]


class UnsupportedSpace(ValueError):
    """An observation space or action space that rlflame does not support.

    `hint` says how to change the environment.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class UnknownPart(UnsupportedSpace):
    """A part of the observation that environment.ignore names and that does not exist."""


class ActionLayout(NamedTuple):
    """The fields of an `EnvSpec` that describe actions."""

    action_kind: ActionKind
    action_size: int
    action_start: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    action_shape: tuple[int, ...] | None
    action_leaves: tuple[SpaceLeaf, ...]
    action_counts: tuple[int, ...]


def iterate_leaves(space: spaces.Space[Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the space of each part that is neither a Dict nor a Tuple."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            if not isinstance(key, str):
                message = f"a Dict space with the key {key!r}, which is not text"
                raise UnsupportedSpace(message, "use strings as keys")
            yield from iterate_leaves(part, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from iterate_leaves(part, (*path, index))
    else:
        yield path, space


def make_leaf(path: Path, space: Any) -> SpaceLeaf | None:
    """Return a description of a space without parts, or None if it is not supported."""
    if isinstance(space, spaces.Box):
        kind = space.dtype.kind
        return SpaceLeaf(path, "box", str(space.dtype), space.shape) if kind in "fiub" else None
    if isinstance(space, spaces.Discrete):
        n, start = int(space.n), int(space.start)
        return SpaceLeaf(path, "discrete", str(space.dtype), (), (n,), (start,))
    if isinstance(space, spaces.MultiDiscrete):
        counts, starts = (tuple(map(int, array.ravel())) for array in (space.nvec, space.start))
        return SpaceLeaf(path, "multi_discrete", str(space.dtype), space.shape, counts, starts)
    if isinstance(space, spaces.MultiBinary):
        return SpaceLeaf(path, "multi_binary", str(space.dtype), space.shape)
    return None


def is_text(space: spaces.Space[Any]) -> bool:
    """Return whether a space contains text, also if it is not Gymnasium's Text space."""
    return isinstance(space, spaces.Text) or getattr(space.dtype, "kind", "") == "U"


def read_observation_leaves(
    space: spaces.Space[Any], ignore: Sequence[str], mask_source: MaskSource
) -> tuple[tuple[SpaceLeaf, ...], tuple[str, ...]]:
    """Return the leaves of an observation space, and the names of the parts left out.

    Raises UnsupportedSpace.
    """
    leaves: list[SpaceLeaf] = []
    omissions: list[str] = []
    parts = list(iterate_leaves(space))
    names = [format_path(path) for path, _ in parts]
    if unknown := [name for name in ignore if name not in names]:
        parts_text = ", ".join(filter(None, names))
        raise UnknownPart(
            f"no part {unknown[0]!r} in its observations, which environment.ignore names",
            f"its parts are {parts_text}"
            if parts_text
            else f"omit environment.ignore: an observation is a {space}, which has no parts",
        )
    for (path, part), name in zip(parts, names, strict=True):
        if mask_source == "observation" and path == (MASK_NAME,):
            continue
        if name in ignore or (path and is_text(part)):
            omissions.append(name)
            continue
        leaf = make_leaf(path, part)
        if leaf is None:
            raise _refuse_observation(part, name)
        if is_image(leaf) and math.prod(leaf.shape) > MAX_IMAGE_SIZE:
            raise UnsupportedSpace(
                f"images of {' x '.join(map(str, leaf.shape))} as observations, with more than "
                f"{MAX_IMAGE_SIZE:,} numbers",
                'shrink them: --wrap "gymnasium.wrappers:ResizeObservation,shape=[42, 42]", and '
                "--wrap gymnasium.wrappers:GrayscaleObservation for images in colour",
            )
        leaves.append(leaf)
    if sum(map(count_observations, leaves)) == 0:
        raise UnsupportedSpace(
            f"observations in {space}, which contain no number",
            "add a wrapper that returns numbers: subclass gymnasium.ObservationWrapper",
        )
    return tuple(leaves), tuple(omissions)


def _refuse_observation(space: spaces.Space[Any], name: str) -> UnsupportedSpace:
    kind = type(space).__name__
    place = f" in {name!r}" if name else ""
    verbs = {"Text": "encodes the text", "Graph": "flattens the graph", "Sequence": "pads it"}
    hint = (
        "write a gymnasium.ObservationWrapper whose observation method "
        f"{verbs.get(kind, 'converts it')} to a Box, and add it with --wrap MODULE:CLASS"
    )
    if name:
        hint += f"; or leave it out: --set 'environment.ignore=[\"{name}\"]'"
    return UnsupportedSpace(f"observations of type {kind}{place}", hint)


def read_action_layout(space: spaces.Space[Any]) -> ActionLayout:
    """Return the layout of an action space; raise UnsupportedSpace."""
    parts = list(iterate_leaves(space))
    leaves: list[SpaceLeaf] = []
    low: list[float] = []
    high: list[float] = []
    for path, part in parts:
        leaf = make_leaf(path, part)
        if leaf is None or (leaf.kind == "box" and leaf.dtype == "bool"):
            kind, place = type(part).__name__, f" in {format_path(path)!r}" if path else ""
            raise UnsupportedSpace(
                f"actions of type {kind}{place}",
                "write a gymnasium.ActionWrapper whose action_space is a Box, Discrete, "
                "MultiDiscrete, MultiBinary, Tuple or Dict, and add it with --wrap MODULE:CLASS",
            )
        leaves.append(leaf)
        if isinstance(part, spaces.Box):
            low += map(float, part.low.ravel())
            high += map(float, part.high.ravel())
        else:
            counts = list_counts(leaf)
            low += [0.0] * len(counts)
            high += [count - 1.0 for count in counts]
    counts = [count for leaf in leaves for count in list_counts(leaf)]
    if not counts:
        raise UnsupportedSpace(f"actions in {space}, which contain nothing", "add an action")
    first, is_plain = leaves[0], [leaf.path for leaf in leaves] == [()]
    if len(counts) == 1 and counts[0]:
        is_known = is_plain and first.kind == "discrete" and first.dtype == "int64"
        start = first.starts[0] if is_known else 0
        kept_leaves = () if is_known else tuple(leaves)
        return ActionLayout("discrete", counts[0], start, (), (), (), kept_leaves, ())
    bounds = tuple(low), tuple(high)
    if any(counts):
        layout = tuple(leaves), tuple(counts)
        return ActionLayout("composite", len(counts), 0, *bounds, None, *layout)
    is_known = is_plain and first.dtype == "float32"
    shape = first.shape if is_known else None
    kept_leaves = () if is_known else tuple(leaves)
    return ActionLayout("continuous", len(counts), 0, *bounds, shape, kept_leaves, ())


def find_mask_source(env: gymnasium.Env[Any, Any]) -> MaskSource:
    """Return where an environment reports its action masks. This may reset it."""
    space = env.observation_space
    if isinstance(space, spaces.Dict) and MASK_NAME in space.spaces:
        return "observation"
    if env.has_wrapper_attr(MASK_METHOD):
        return "method"
    info: Any = {}
    # A worker that fails to reset the environment reports the error.
    with contextlib.suppress(Exception):
        _, info = env.reset(seed=0)
    return "info" if isinstance(info, Mapping) and MASK_NAME in info else "none"


class MaskReader:
    """Reads the action mask of an environment after a reset or step."""

    def __init__(self, env: gymnasium.Env[Any, Any], source: MaskSource) -> None:
        self._source = source
        self._method: Any = env.get_wrapper_attr(MASK_METHOD) if source == "method" else None

    def read(self, observation: Any, info: Any) -> Any:
        """Return the mask; raise SpaceError if there is none."""
        if self._source == "method":
            return self._method()
        values = observation if self._source == "observation" else info
        try:
            return values[MASK_NAME]
        except (KeyError, TypeError, IndexError):
            raise SpaceError(f"gave no {MASK_NAME} in its {self._source}") from None


def has_equal_leaves(space: spaces.Space[Any], leaves: Sequence[SpaceLeaf]) -> bool:
    """Return whether a space has these leaves, and possibly others."""
    actual = {path: make_leaf(path, part) for path, part in iterate_leaves(space)}
    return all(actual.get(leaf.path) == leaf for leaf in leaves)


def make_observation_fields(leaves: tuple[SpaceLeaf, ...]) -> dict[str, Any]:
    """Return the fields of an `EnvSpec` that describe observations."""
    size = sum(map(count_observations, leaves))
    is_box = len(leaves) == 1 and leaves[0].path == () and leaves[0].kind == "box"
    is_flat = is_box and len(leaves[0].shape) == 1
    return {"observation_size": size, "observation_leaves": () if is_flat else leaves}
