"""How several learners stay one: rank 0 is told what happened, and tells the others.

`ReplicatedAlgorithm` stands in the algorithm's place on rank 0, and `run_replica` is the whole life
of the others. Must not know: processes, sockets, which algorithm it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from rlflame.errors import LearningError
from rlflame.rollout.spec import Array, PolicyArrays

from ..base import Algorithm, Batch, Metrics, ReplayBatch, State, Transitions, compute_digest
from .process_group import ProcessGroup


class ReplicatedAlgorithm:
    """An algorithm whose every change the other learners go through as well."""

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
    """Do as rank 0 does, until it is over."""
    while message := group.broadcast(None):
        if "state" in message:
            algorithm.load_state(message["state"])
        else:
            algorithm.update(_make_replica_batch(message["update"], group), message["progress"])


def release_replicas(group: ProcessGroup) -> None:
    """Rank 0 lets the others go."""
    group.broadcast({})


def check_fingerprints(group: ProcessGroup, fingerprint: Mapping[str, str]) -> None:
    """What every learner computes for itself is the same only on machines of one kind."""
    names = {name: np.frombuffer(text.encode(), np.uint8) for name, text in fingerprint.items()}
    digest = np.frombuffer(bytearray.fromhex(compute_digest(names)), np.float32)
    digests = group.gather(digest)
    for rank, row in enumerate(digests):
        if row.tobytes() != digests[0].tobytes():
            raise LearningError(
                f"Learner {rank} runs on another kind of machine than learner 0, where equal "
                "arithmetic has other last bits.",
                "use machines with the same processor type and the same versions of all packages",
            )


def to_message(batch: Batch | ReplayBatch) -> dict[str, Any]:
    """What a wire carries of a batch; of one with a replay, all but what will be drawn."""
    if isinstance(batch, Batch):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {
        "fresh": to_message(batch.fresh),
        "first_update": batch.first_update,
        "updates": batch.updates,
    }


def _make_broadcast_batch(batch: Batch | ReplayBatch, group: ProcessGroup) -> Batch | ReplayBatch:
    """The same batch; what is drawn from a replay goes to everybody."""
    if isinstance(batch, Batch):
        return batch

    def draw_and_broadcast(update: int) -> Transitions:
        transitions = batch.draw(update)
        group.broadcast(
            {field.name: getattr(transitions, field.name) for field in fields(transitions)}
        )
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
    """What came over a wire cannot be written to, and torch wants to be able to."""
    return {
        name: array.copy() if isinstance(array, np.ndarray) else array
        for name, array in arrays.items()
    }
