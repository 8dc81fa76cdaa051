"""Divides minibatches among learners, and keeps all learners in the same state.

A sum of float32 numbers depends on the order of addition. Therefore, the recipe defines the shards,
a single learner computes each shard, and the shards are added in order. Results are bit-identical
for any number of learners. Only rank 0 has a fleet, files and a display. Its `ReplicatedAlgorithm`
broadcasts every call, and `run_replica` repeats the calls on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlflame.errors import LearningError
from rlflame.rollout.task import Array, Float32, PolicyArrays

from ..base import Algorithm, Batch, Metrics, ReplayBatch, State, Transitions, compute_digest


class SharedMemory(NamedTuple):
    """Memory that all learners of a group can access, without a barrier."""

    #: One row of bytes for each learner.
    rows: NDArray[np.uint8]
    #: Waits until another learner has written what `is_ready` looks for. Raises LostLearner if
    #: another learner has ended or is late.
    wait_until: Callable[[Callable[[], bool]], None]


class ProcessGroup(Protocol):
    """The learners of one run, which call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, values: Float32) -> Float32:
        """Return the arrays of all learners, stacked by rank; valid until the next call."""

    def use_device(self, device: str) -> None:
        """Exchange arrays on this device from now on, if the group supports it."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on all ranks; the other ranks pass None.

        `wire` must be able to encode the value.
        """

    @property
    def share_memory(self) -> Callable[[int], SharedMemory] | None:
        """A function that makes zeroed memory of some bytes for each learner, or None."""


class SingleProcessGroup:
    """A group of one learner."""

    rank = 0
    size = 1
    share_memory = None

    def gather(self, values: Float32) -> Float32:
        return values[None]

    def use_device(self, device: str) -> None:
        """Do nothing, because a single learner exchanges no gradients."""

    def broadcast(self, value: Any) -> Any:
        return value


class Shard(NamedTuple):
    """A part of a minibatch: its number and its range of rows."""

    number: int
    rows: slice


class Shards:
    """Divides minibatches into shards, and gathers and adds their gradients."""

    def __init__(self, count: int = 1, group: ProcessGroup | None = None) -> None:
        self.count = count
        #: The learners that compute the shards; the group may be replaced between updates.
        self.group: ProcessGroup = SingleProcessGroup() if group is None else group
        self._parts: Float32 = np.empty((0, 0), np.float32)
        self._state: Callable[[], State] | None = None
        self._compared_updates = 1
        self._update_count = 0

    def compare_every(self, updates: int, state: Callable[[], State]) -> None:
        """From now on, compare the states of all learners every `updates` updates."""
        self._state, self._compared_updates = state, updates

    def use_group(self, group: ProcessGroup) -> None:
        """From now on, divide the shards among the learners of another group."""
        self.group, self._update_count = group, 0

    @contextmanager
    def use_one_learner(self) -> Iterator[None]:
        """Compute all shards in this process inside the `with` block; count no updates."""
        group, update_count = self.group, self._update_count
        self.group = SingleProcessGroup()
        yield
        self.group, self._update_count = group, update_count

    @property
    def _per_learner(self) -> int:
        return -(-self.count // self.group.size)

    def compare_states(self, updates: int = 1) -> None:
        """Count updates, and compare the states of the learners if a check is due."""
        if self._state is None:
            return
        comparisons = self._update_count // self._compared_updates
        self._update_count += updates
        if self._update_count // self._compared_updates == comparisons:
            return
        different = find_deviating_ranks(self.group, self._state())
        if different:
            raise LearningError(
                f"Learners {', '.join(map(str, different))} have different weights from learner 0.",
                "use machines of one kind; rlflame inspect compares the machines of two runs",
            )

    def split(self, rows: int) -> list[Shard]:
        """Divide rows into nearly equal shards, or into one if there are too few rows."""
        if self.count == 1 or rows < self.count:
            return [Shard(0, slice(0, rows))]
        size, longer = divmod(rows, self.count)
        ends = [size * n + min(n, longer) for n in range(self.count + 1)]
        return [Shard(n, slice(ends[n], ends[n + 1])) for n in range(self.count)]

    def compute_gradient(
        self, rows: int, compute_part: Callable[[Shard], tuple[Float32, Metrics]]
    ) -> tuple[Float32, Metrics]:
        """Return the gradient and the metric sums, added over all shards.

        `compute_part` divides its gradient by the size of the whole minibatch, so the total
        gradient is the mean over the samples, even if shards differ in size. Clip the total, not
        the parts. The next call may overwrite the gradient.
        """
        self.compare_states()
        shards = self.split(rows)
        if len(shards) == 1:
            return compute_part(shards[0])
        for place, shard in enumerate(self._select_local(shards)):
            gradient, sums = compute_part(shard)
            size, shape = len(gradient), (self._per_learner, len(gradient) + 2 * len(sums))
            if self._parts.shape != shape:
                self._parts = np.empty(shape, np.float32)
            # The float64 sums follow the gradient as pairs of float32 values.
            self._parts[place, :size] = gradient
            self._parts[place, size:] = np.array(list(sums.values())).view(np.float32)
        parts = self.group.gather(self._parts)
        all_rows = parts.reshape(-1, self._parts.shape[1])[: self.count]
        total: Float32 = all_rows[0, :size].copy()
        for row in all_rows[1:]:
            total += row[:size]
        totals = dict.fromkeys(sums, 0.0)
        for values in all_rows[:, size:].copy().view(np.float64).tolist():
            for name, value in zip(totals, values, strict=True):
                totals[name] += value
        return total, totals

    def _select_local(self, shards: list[Shard]) -> list[Shard]:
        first = self.group.rank * self._per_learner
        return shards[first : first + self._per_learner]


class ShardedAlgorithm(Algorithm[Any], Protocol):
    """An algorithm whose gradients a group of learners can compute together."""

    shards: Shards


class ReplicatedAlgorithm:
    """An algorithm on rank 0 that broadcasts every change to the other learners."""

    def __init__(self, algorithm: Algorithm[Any], group: ProcessGroup) -> None:
        self._algorithm = algorithm
        self._group = group
        self.broadcast_state()

    def get_policy(self) -> PolicyArrays:
        return self._algorithm.get_policy()

    def update(self, batch: Batch | ReplayBatch, progress: float) -> Metrics:
        message = {"progress": progress, "updates": None}
        if isinstance(batch, Batch):
            self._group.broadcast({**message, "batch": to_message(batch)})
            return self._algorithm.update(batch, progress)
        updates = [batch.first_update, batch.updates]
        self._group.broadcast({**message, "batch": to_message(batch.fresh), "updates": updates})
        draw = partial(self._draw, batch)
        return self._algorithm.update(replace(batch, draw=draw), progress)

    def _draw(self, batch: ReplayBatch, update: int) -> Transitions:
        """Draw transitions from rank 0's replay buffer and broadcast them."""
        transitions = batch.draw(update)
        self._group.broadcast(to_message(transitions))
        return transitions

    def get_state(self) -> State:
        return self._algorithm.get_state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._algorithm.load_state(state)
        self.broadcast_state()

    def broadcast_state(self) -> None:
        """Send the state of this learner to the others."""
        self._group.broadcast({"state": self._algorithm.get_state()})


def run_replica(algorithm: Algorithm[Any], group: ProcessGroup) -> None:
    """Apply every change that rank 0 broadcasts, until rank 0 releases this learner."""

    def receive_transitions(update: int) -> Transitions:
        return Transitions(**_make_writable(group.broadcast(None)))

    while message := group.broadcast(None):
        if "state" in message:
            algorithm.load_state(message["state"])
            continue
        fresh = from_message(message["batch"])
        if message["updates"] is None:
            algorithm.update(fresh, message["progress"])
        else:
            first, count = message["updates"]
            replay_batch = ReplayBatch(fresh, first, count, receive_transitions)
            algorithm.update(replay_batch, message["progress"])


def release_replicas(group: ProcessGroup) -> None:
    """End `run_replica` on the other ranks."""
    group.broadcast({})


def check_fingerprints(group: ProcessGroup, fingerprint: Mapping[str, str]) -> None:
    """Raise LearningError if the learners run on different kinds of machines."""
    arrays = {name: np.frombuffer(text.encode(), np.uint8) for name, text in fingerprint.items()}
    for rank in find_deviating_ranks(group, arrays):
        raise LearningError(
            f"Learner {rank} runs on a different kind of machine from learner 0, so results would "
            "not be reproducible.",
            "use machines with the same processor type and the same versions of all packages",
        )


def find_deviating_ranks(group: ProcessGroup, arrays: Mapping[str, Array]) -> list[int]:
    """Return the ranks whose arrays differ from those of rank 0."""
    digests = gather_digests(group, arrays)
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


def gather_digests(group: ProcessGroup, arrays: Mapping[str, Array]) -> list[bytes]:
    """Return the digest of each learner's arrays, by rank."""
    digest = np.frombuffer(bytearray.fromhex(compute_digest(arrays)), np.float32)
    return [row.tobytes() for row in group.gather(digest)]


def to_message(value: Batch | Transitions) -> dict[str, Any]:
    """Return the fields of a value as a dictionary that `wire` can encode."""
    return {item.name: getattr(value, item.name) for item in fields(value)}


def from_message(message: Mapping[str, Any]) -> Batch:
    """Return the batch that a message contains."""
    return Batch(**_make_writable(message))


def _make_writable(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Copy decoded arrays, because torch warns about their read-only memory."""
    return {
        name: array.copy() if isinstance(array, np.ndarray) else array
        for name, array in arrays.items()
    }
