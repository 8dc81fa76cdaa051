"""The buffer of on-policy algorithms, and fragments as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlflame.rollout.task import Array, Fragment, PolicyArrays

from ..base import Batch, Segment, State


class RolloutBuffer:
    """Yields the fresh fragments as one batch and forgets them."""

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
    """One batch of all columns, in the order of the fragments, with zeros where one is idle."""
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
        # A row whose episode has ended is carried along in its worker: none of that counts.
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
