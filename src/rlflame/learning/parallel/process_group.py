"""The learners of one run: what they exchange, and how all of them stay in the same state.

Every learner holds the same weights and the same batch and does the same arithmetic; only the
gradients of a minibatch's shards are computed by one learner each, and gathered. Rank 0 alone has
a fleet, files and a display: its `ReplicatedAlgorithm` broadcasts every call, and `run_replica`
repeats the calls on the other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from rlflame.errors import LearningError
from rlflame.rollout.task import Array, Float32, PolicyArrays

from ..base import Algorithm, Batch, Metrics, ReplayBatch, State, Transitions, compute_digest


class ProcessGroup(Protocol):
    """The learners of one run; all call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, values: Float32) -> Float32:
        """The arrays of all learners, of one shape, stacked by rank; valid until the next call."""

    def use_device(self, device: str) -> None:
        """From now on gather on `device`, where gradients are made, if that is possible."""

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, which `wire` can carry. Other ranks pass None, and wait."""


class SingleProcessGroup:
    """The only learner of a run."""

    rank = 0
    size = 1

    def gather(self, values: Float32) -> Float32:
        return values[None]

    def use_device(self, device: str) -> None:
        """Nothing is exchanged."""

    def broadcast(self, value: Any) -> Any:
        return value


class ReplicatedAlgorithm:
    """An algorithm on rank 0 that broadcasts every change to the other learners."""

    def __init__(self, algorithm: Algorithm[Any], group: ProcessGroup) -> None:
        self._algorithm = algorithm
        self._group = group
        self._broadcast_state()

    def get_policy(self) -> PolicyArrays:
        return self._algorithm.get_policy()

    def update(self, batch: Batch | ReplayBatch, progress: float) -> Metrics:
        self._group.broadcast({"update": to_message(batch), "progress": progress})
        return self._algorithm.update(_make_broadcast_batch(batch, self._group), progress)

    def get_state(self) -> State:
        return self._algorithm.get_state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._algorithm.load_state(state)
        self._broadcast_state()

    def _broadcast_state(self) -> None:
        self._group.broadcast({"state": self._algorithm.get_state()})


def run_replica(algorithm: Algorithm[Any], group: ProcessGroup) -> None:
    """Repeat every change of rank 0, until it releases this learner."""
    while message := group.broadcast(None):
        if "state" in message:
            algorithm.load_state(message["state"])
        else:
            algorithm.update(_make_replica_batch(message["update"], group), message["progress"])


def release_replicas(group: ProcessGroup) -> None:
    """End `run_replica` on the other ranks."""
    group.broadcast({})


def check_fingerprints(group: ProcessGroup, fingerprint: Mapping[str, str]) -> None:
    """What every learner computes for itself is the same only on machines of one kind."""
    arrays = {name: np.frombuffer(text.encode(), np.uint8) for name, text in fingerprint.items()}
    for rank in find_deviating_ranks(group, arrays):
        raise LearningError(
            f"Learner {rank} runs on another kind of machine than learner 0, where equal "
            "arithmetic has other last bits.",
            "use machines with the same processor type and the same versions of all packages",
        )


def find_deviating_ranks(group: ProcessGroup, arrays: Mapping[str, Array]) -> list[int]:
    """The learners whose arrays differ from those of rank 0."""
    digest = np.frombuffer(bytearray.fromhex(compute_digest(arrays)), np.float32)
    first, *_ = digests = [row.tobytes() for row in group.gather(digest)]
    return [rank for rank, row in enumerate(digests) if row != first]


def to_message(batch: Batch | ReplayBatch) -> dict[str, Any]:
    """A batch as `wire` carries it; of a replay batch, all but the transitions."""
    if isinstance(batch, Batch):
        return _to_dict(batch)
    return {
        "fresh": to_message(batch.fresh),
        "first_update": batch.first_update,
        "updates": batch.updates,
    }


def _to_dict(value: Batch | Transitions) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _make_broadcast_batch(batch: Batch | ReplayBatch, group: ProcessGroup) -> Batch | ReplayBatch:
    """The same batch; transitions that are drawn from a replay are broadcast."""
    if isinstance(batch, Batch):
        return batch

    def draw_and_broadcast(update: int) -> Transitions:
        transitions = batch.draw(update)
        group.broadcast(_to_dict(transitions))
        return transitions

    return ReplayBatch(batch.fresh, batch.first_update, batch.updates, draw_and_broadcast)


def _make_replica_batch(message: Mapping[str, Any], group: ProcessGroup) -> Batch | ReplayBatch:
    if "fresh" not in message:
        return from_message(message)
    return ReplayBatch(
        from_message(message["fresh"]),
        message["first_update"],
        message["updates"],
        lambda update: Transitions(**_make_writable(group.broadcast(None))),
    )


def from_message(message: Mapping[str, Any]) -> Batch:
    """The batch of a message."""
    return Batch(**_make_writable(message))


def _make_writable(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Decoded arrays are read-only, and torch warns about those."""
    return {
        name: array.copy() if isinstance(array, np.ndarray) else array
        for name, array in arrays.items()
    }
