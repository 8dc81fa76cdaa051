"""Interfaces for algorithms and buffers, and the data that they exchange and save.

`Algorithm.get_state()` returns the complete state of an algorithm. The buffer selects the batches
that the algorithm learns from in each iteration, so it determines whether learning is on-policy or
off-policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflame.errors import LearningError
from rlflame.rollout.task import Array, Float32, Float64, Fragment, PolicyArrays

#: Arrays by name, as stored in a checkpoint.
State = dict[str, Array]
Metrics = dict[str, float]
Int64 = NDArray[np.int64]
MinibatchT = TypeVar("MinibatchT", contravariant=True)
LearnsFrom = TypeVar("LearnsFrom", contravariant=True)
Yields = TypeVar("Yields", covariant=True)
#: Above this number, float64 cannot represent every integer.
_MAX_COUNT = 2**53


@dataclass(frozen=True, slots=True)
class Batch:
    """An iteration's fragments, concatenated in slot order into `[T, columns, ...]`.

    Each column holds the steps of one environment. If rollouts consist of whole episodes, a column
    holds one episode; after its last step, `valid` is False and the other arrays are zero.
    """

    observations: Float32
    actions: Array
    log_probs: Float32
    rewards: Float64
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    last_observations: Float32
    boundary_index: Int64
    boundary_observations: Float32
    #: The arrays of the policy that acted, including any normaliser statistics.
    behaviour: PolicyArrays

    @property
    def steps(self) -> int:
        return int(self.valid.sum())


@dataclass(frozen=True, slots=True)
class Transitions:
    """A batch of replayed transitions; the next draw overwrites the arrays."""

    #: Raw observations from the environment, not normalised.
    observations: Float32
    actions: Float32
    #: The discounted sum of rewards over n steps, or fewer if the episode or the data ends first.
    rewards: Float32
    #: The observation after the last summed step, which can be the episode's final observation.
    next_observations: Float32
    #: The factor for the value of `next_observations`: the discount over the summed steps, or 0
    #: after a termination.
    bootstrap: Float32


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """The updates due after an iteration, each with its own transitions."""

    #: The iteration's new steps, used for observation statistics.
    fresh: Batch
    #: The number of the first update. Updates are numbered from zero throughout the run.
    first_update: int
    updates: int
    draw: Callable[[int], Transitions]

    def __iter__(self) -> Iterator[tuple[int, Transitions]]:
        for update in range(self.first_update, self.first_update + self.updates):
            yield update, self.draw(update)


@dataclass(frozen=True, slots=True)
class Segment:
    """An immutable block of replay transitions that can be stored in a file."""

    number: int
    #: The digest of the content. The content includes the digest of the previous segment.
    digest: str
    #: Returns the content from memory, or reads it from its file and verifies it.
    arrays: Callable[[], State] = field(compare=False, repr=False)


def compute_digest(arrays: Mapping[str, Array]) -> str:
    """Return a SHA-256 digest of the arrays' names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


class MetricMeans:
    """Averages each metric over the updates that reported it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def make_metrics(self) -> Metrics:
        return {name: total / count for name, (total, count) in self._sums.items()}


class Algorithm(Protocol[LearnsFrom]):
    """A learning algorithm: its weights, and the rule that updates them.

    The `progress` of an update is the fraction of the training schedule that has passed.
    """

    def get_policy(self) -> PolicyArrays:
        """Return copies of the arrays that workers need: the actor and any normaliser."""

    def update(self, batch: LearnsFrom, progress: float) -> Metrics: ...

    def get_state(self) -> State: ...

    def load_state(self, state: Mapping[str, Array]) -> None: ...


class Buffer(Protocol[Yields]):
    """Turns fragments into the batches that an algorithm learns from."""

    def add(self, fragments: Sequence[Fragment], behaviour: PolicyArrays) -> None:
        """Add one iteration's fragments, in slot order, and the policy that acted."""

    def take_batches(self) -> Iterator[Yields]: ...

    def get_state(self) -> State:
        """Return all of the buffer's data that is not in a segment."""

    def list_segments(self) -> tuple[Segment, ...]:
        """Return the segments in use, which hold the data that `get_state` omits."""

    def load_state(self, state: Mapping[str, Array], segments: Sequence[Segment]) -> None: ...


class GradientProvider(Protocol[MinibatchT]):
    """Computes the gradients of an algorithm's loss, in numpy or with torch autograd.

    Both implementations use the same flat float32 vector and must agree up to rounding.
    """

    def compute_gradient(self, minibatch: MinibatchT, count: int) -> tuple[Float32, Metrics]:
        """Return the gradient of (sum of sample losses) / `count`, and summed metrics.

        `minibatch` may be one shard of a minibatch. `count` refers to the whole minibatch, so that
        the gradients of its shards add up. The gradient is valid until the next call.
        """


@dataclass
class Counter:
    """A mutable integer in a saved state, faster to increment than an array."""

    value: int = 0


class StateParts:
    """The named arrays and counters of a saved state, which `load_state` restores.

    If the recipe does not use an array, pass None for it. Integer arrays must contain counts.
    """

    def __init__(self, **parts: Array | Counter | StateParts | None) -> None:
        self._parts: dict[str, Array | Counter] = {}
        for name, part in parts.items():
            if isinstance(part, StateParts):
                self._parts |= {f"{name}.{key}": value for key, value in part._parts.items()}
            elif part is not None:
                self._parts[name] = part

    def get_state(self) -> State:
        return {
            name: np.array(part.value, np.int64) if isinstance(part, Counter) else part.copy()
            for name, part in self._parts.items()
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        for name, part in self._parts.items():
            if isinstance(part, Counter):
                part.value = restore_count(name, state)
                continue
            restore(part, name, state)
            if part.dtype == np.int64:
                _check_counts(part, name)


def restore(target: Array, name: str, state: Mapping[str, Array]) -> None:
    """Copy a saved array into `target`; raise LearningError if it does not match."""
    values = state.get(name)
    if values is None or values.shape != target.shape or values.dtype != target.dtype:
        description = "missing" if values is None else f"{values.dtype} {values.shape}"
        raise LearningError(
            f"The saved learner's {name} is {description}; expected {target.dtype} {target.shape}.",
            "use a checkpoint of the same recipe",
        )
    target[...] = values


def restore_count(name: str, state: Mapping[str, Array]) -> int:
    """Return a saved count; raise LearningError if it is missing or impossible."""
    count = np.zeros((), np.int64)
    restore(count, name, state)
    _check_counts(count, name)
    return int(count)


def _check_counts(counts: Int64, name: str) -> None:
    if counts.min() < 0 or counts.max() >= _MAX_COUNT:
        raise LearningError(
            f"The saved learner's {name} is {counts}, which is not a possible count.",
            "use an earlier checkpoint of the same run",
        )
