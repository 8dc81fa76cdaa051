"""The buffer for on-policy algorithms, and functions for returns and advantages.

The functions take `[T, columns]` arrays. They distinguish terminations from truncations where the
difference matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlflame.rollout.task import Array, Float64, Fragment, PolicyArrays

from ..base import Batch, Segment, State

Mask = NDArray[np.bool_]


class RolloutBuffer:
    """Yields each iteration's fragments as one batch, then discards them."""

    def __init__(self) -> None:
        self._batch: Batch | None = None

    def add(self, fragments: Sequence[Fragment], behaviour: PolicyArrays) -> None:
        self._batch = concatenate_fragments(fragments, behaviour)

    def take_batches(self) -> Iterator[Batch]:
        if self._batch is not None:
            batch, self._batch = self._batch, None
            yield batch

    def get_state(self) -> State:
        return {}

    def list_segments(self) -> tuple[Segment, ...]:
        return ()

    def load_state(self, state: Mapping[str, Array], segments: Sequence[Segment]) -> None:
        del state, segments


def concatenate_fragments(fragments: Sequence[Fragment], behaviour: PolicyArrays) -> Batch:
    """Join the columns of all fragments into one batch, with zeros at idle steps."""
    steps = max(len(fragment.rewards) for fragment in fragments)
    lengths = np.concatenate([fragment.lengths for fragment in fragments])
    valid = np.arange(steps)[:, None] < lengths
    idle = None if valid.all() else ~valid

    def join(name: str) -> Array:
        parts: list[Array] = [getattr(fragment, name) for fragment in fragments]
        shape = (steps, len(lengths), *parts[0].shape[2:])
        if idle is None:
            return np.concatenate(parts, axis=1, out=np.empty(shape, parts[0].dtype))
        out = np.zeros(shape, parts[0].dtype)
        column = 0
        for part in parts:
            out[: len(part), column : column + part.shape[1]] = part
            column += part.shape[1]
        # Discard the observations and actions that the worker recorded for idle environments.
        out[idle] = 0
        return out

    columns = [len(fragment.lengths) for fragment in fragments]
    offsets = np.cumsum([0, *columns[:-1]])
    boundaries = [
        fragment.boundary_index + np.array([0, offset], np.int64)
        for fragment, offset in zip(fragments, offsets, strict=True)
    ]
    return Batch(
        observations=join("observations"),
        actions=join("actions"),
        log_probs=join("log_probs"),
        rewards=join("rewards"),
        terminated=join("terminated"),
        truncated=join("truncated"),
        valid=valid,
        last_observations=np.concatenate([f.last_observations for f in fragments]),
        boundary_index=np.concatenate(boundaries),
        boundary_observations=np.concatenate([f.boundary_observations for f in fragments]),
        behaviour=behaviour,
    )


def compute_discounted_returns(rewards: Float64, ends: Mask, discount: float) -> Float64:
    """Compute the discounted reward-to-go of each step within its episode."""
    return _accumulate(rewards, np.where(ends, 0.0, discount))


def compute_continued_returns(
    rewards: Float64, terminated: Mask, truncated: Mask, valid: Mask, discount: float
) -> Float64:
    """Compute rewards-to-go, which include the mean value V after a truncation.

    The mean over all steps satisfies V = mean(G + w V). G is the discounted return from a step to
    the end of its episode, and w is the discount from that step to the truncation, or 0 if the
    episode was not truncated.
    """
    ends = terminated | truncated
    returns = compute_discounted_returns(rewards, ends, discount)
    weights = compute_discounted_returns(np.where(truncated, discount, 0.0), ends, discount)
    mean = returns[valid].mean() / (1.0 - weights[valid].mean())
    returns += weights * mean
    return returns


def compute_gae(
    rewards: Float64,
    values: Float64,
    next_values: Float64,
    terminated: Mask,
    truncated: Mask,
    discount: float,
    gae_lambda: float,
) -> Float64:
    """Compute generalised advantage estimates (Schulman et al., 2016).

    `next_values[t]` is the value of the observation after step t, which can be a final observation.
    After a termination, the value counts as 0. After a truncation, no later steps are added.
    """
    delta = rewards + discount * np.where(terminated, 0.0, next_values) - values
    decay = np.where(terminated | truncated, 0.0, discount * gae_lambda)
    return _accumulate(delta, decay)


def _accumulate(terms: Float64, decay: Float64) -> Float64:
    """Compute `result[t] = terms[t] + decay[t] * result[t + 1]` backwards."""
    result = terms.copy()
    for t in range(len(terms) - 2, -1, -1):
        result[t] += decay[t] * result[t + 1]
    return result
