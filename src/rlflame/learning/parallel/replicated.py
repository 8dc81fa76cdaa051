"""How several learners stay one: rank 0 is told what happened, and tells the others.

`Leading` stands in the algorithm's place on rank 0, and `follow` is the whole life of the others.
Must not know: processes, sockets, which algorithm it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from rlflame.errors import LearningError
from rlflame.rollout.spec import Array, PolicyArrays

from ..base import Algorithm, Batch, Metrics, ReplayBatch, State, Transitions, digest_of
from .process_group import Group


class Leading:
    """An algorithm whose every change the other learners go through as well."""

    def __init__(self, algorithm: Algorithm[Any], group: Group) -> None:
        self._algorithm = algorithm
        self._group = group
        self._share_state()

    def policy(self) -> PolicyArrays:
        return self._algorithm.policy()

    def update(self, batch: Batch | ReplayBatch, progress: float) -> Metrics:
        self._group.share({"update": message_of(batch), "progress": progress})
        return self._algorithm.update(_leading(batch, self._group), progress)

    def state(self) -> State:
        return self._algorithm.state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._algorithm.load_state(state)
        self._share_state()

    def _share_state(self) -> None:
        self._group.share({"state": self._algorithm.state()})


def follow(algorithm: Algorithm[Any], group: Group) -> None:
    """Do as rank 0 does, until it is over."""
    while message := group.share(None):
        if "state" in message:
            algorithm.load_state(message["state"])
        else:
            algorithm.update(_following(message["update"], group), message["progress"])


def release(group: Group) -> None:
    """Rank 0 lets the others go."""
    group.share({})


def check_alike(group: Group, fingerprint: Mapping[str, str]) -> None:
    """What every learner computes for itself is the same only on machines of one kind."""
    names = {name: np.frombuffer(text.encode(), np.uint8) for name, text in fingerprint.items()}
    mine = np.frombuffer(bytearray.fromhex(digest_of(names)), np.float32)
    theirs = group.gather(mine)
    for rank, row in enumerate(theirs):
        if row.tobytes() != theirs[0].tobytes():
            raise LearningError(
                f"Learner {rank} runs on another kind of machine than learner 0, where equal "
                "arithmetic has other last bits.",
                "use machines with the same processor type and the same versions of all packages",
            )


def message_of(batch: Batch | ReplayBatch) -> dict[str, Any]:
    """What a wire carries of a batch; of one with a replay, all but what will be drawn."""
    if isinstance(batch, Batch):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {
        "fresh": message_of(batch.fresh),
        "first_update": batch.first_update,
        "updates": batch.updates,
    }


def _leading(batch: Batch | ReplayBatch, group: Group) -> Batch | ReplayBatch:
    """The same batch; what is drawn from a replay goes to everybody."""
    if isinstance(batch, Batch):
        return batch

    def draw(update: int) -> Transitions:
        drawn = batch.draw(update)
        group.share({field.name: getattr(drawn, field.name) for field in fields(drawn)})
        return drawn

    return ReplayBatch(batch.fresh, batch.first_update, batch.updates, draw)


def _following(message: Mapping[str, Any], group: Group) -> Batch | ReplayBatch:
    if "fresh" not in message:
        return batch_of(message)
    return ReplayBatch(
        batch_of(message["fresh"]),
        message["first_update"],
        message["updates"],
        lambda update: Transitions(**_writable(group.share(None))),
    )


def batch_of(message: Mapping[str, Any]) -> Batch:
    """The batch of a message."""
    return Batch(**_writable(message))


def _writable(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What came over a wire cannot be written to, and torch wants to be able to."""
    return {
        name: array.copy() if isinstance(array, np.ndarray) else array
        for name, array in arrays.items()
    }
