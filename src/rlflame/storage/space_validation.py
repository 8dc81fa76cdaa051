"""Checks the description of an environment's spaces in a checkpoint, which may be crafted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlflame.rollout.space_codec import count_observations, list_action_leaves, list_counts
from rlflame.rollout.task import EnvSpec, SpaceLeaf
from rlflame.storage.run_reader import MAX_COUNT

#: The most dimensions of an array in all versions of numpy.
_MAX_DIMENSIONS = 32
#: The types that the numbers of a space may have.
_DTYPES = {"bool", "float16", "float32", "float64"}
_DTYPES |= {f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)}


def has_valid_spaces(env: EnvSpec) -> bool:
    """Return whether the recorded sizes, bounds and shapes of the spaces are consistent."""
    action_leaves = list_action_leaves(env)
    for leaves in (env.observation_leaves, action_leaves):
        if not _is_tree([leaf.path for leaf in leaves]) or not all(map(_is_valid_leaf, leaves)):
            return False
    size = sum(map(count_observations, env.observation_leaves))
    if env.observation_leaves and size != env.observation_size:
        return False
    is_discrete, is_composite = env.action_kind == "discrete", env.action_kind == "composite"
    if env.action_counts and not is_composite:
        return False
    if env.mask_source != "none" and env.action_kind == "continuous":
        return False
    columns = 0 if is_discrete else env.action_size
    if {len(env.action_low), len(env.action_high)} != {columns}:
        return False
    # A crafted shape may be too large for a list of its elements.
    if sum(math.prod(leaf.shape) for leaf in action_leaves) != max(columns, 1):
        return False
    counts = tuple(count for leaf in action_leaves for count in list_counts(leaf))
    if is_discrete:
        return counts == (env.action_size,) and not env.action_shape
    expected = env.action_counts if is_composite else (0,) * columns
    return counts == expected and any(counts) == is_composite and env.action_start == 0


def _is_tree(paths: Sequence[tuple[str | int, ...]]) -> bool:
    """Return whether no path is equal to another path or leads through it."""
    path_set = set(paths)
    return len(path_set) == len(paths) and not any(
        path[:length] in path_set for path in paths for length in range(len(path))
    )


def _is_valid_leaf(leaf: SpaceLeaf) -> bool:
    """Return whether a recorded leaf has a possible type, shape and number of values."""
    if len(leaf.shape) > _MAX_DIMENSIONS or any(length < 1 for length in leaf.shape):
        return False
    if leaf.dtype not in _DTYPES:
        return False
    choices = math.prod(leaf.shape) if leaf.kind in ("discrete", "multi_discrete") else 0
    if choices >= MAX_COUNT or len(leaf.counts) != choices or len(leaf.starts) != choices:
        return False
    return all(
        count > 0 and abs(start) + count < MAX_COUNT
        for count, start in zip(leaf.counts, leaf.starts, strict=True)
    ) and (leaf.kind != "discrete" or leaf.shape == ())
