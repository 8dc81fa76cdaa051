"""The contracts of learning: algorithms, buffers, what they exchange, and how they are saved.

An Algorithm is complete in its `get_state()`. Whether learning is on- or off-policy is a property
of the Buffer, which decides what batches a new set of fragments owes.
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

#: Tensors by name, as they stand in a checkpoint.
State = dict[str, Array]
Metrics = dict[str, float]
Int64 = NDArray[np.int64]
MinibatchT = TypeVar("MinibatchT", contravariant=True)
LearnsFrom = TypeVar("LearnsFrom", contravariant=True)
Yields = TypeVar("Yields", covariant=True)
#: Beyond it a float does not know one count from the next.
_MAX_COUNT = 2**53


@dataclass(frozen=True, slots=True)
class Batch:
    """Fragments side by side, in slot order: arrays `[T, columns, ...]`.

    `valid` is False where a column was idle because its episode had ended; zeros stand there.
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
    #: The weights that acted, normaliser included.
    behaviour: PolicyArrays

    @property
    def steps(self) -> int:
        return int(self.valid.sum())


@dataclass(frozen=True, slots=True)
class Transitions:
    """Steps drawn from a replay, `[batch, ...]`; valid until the next are drawn."""

    #: As the environment gave them, not normalised.
    observations: Float32
    actions: Float32
    #: The discounted sum over the steps that were really summed, one or more.
    rewards: Float32
    #: What followed the last of them; the real final observation where a time limit ended it.
    next_observations: Float32
    #: What the estimate after the last of them counts: its discount, or 0 where it terminated.
    bootstrap: Float32


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """The updates that an iteration owes, each with transitions of its own."""

    #: The iteration's own steps, for statistics of what is observed.
    fresh: Batch
    #: Updates are numbered through the whole run, from zero.
    first_update: int
    updates: int
    draw: Callable[[int], Transitions]

    def __iter__(self) -> Iterator[tuple[int, Transitions]]:
        for update in range(self.first_update, self.first_update + self.updates):
            yield update, self.draw(update)


@dataclass(frozen=True, slots=True)
class Segment:
    """Transitions of an experience that will not change any more, and that a file can keep."""

    number: int
    #: Of its content, which names the digest of the segment before it.
    digest: str
    #: Its content, taken from memory or verified and read from its file.
    arrays: Callable[[], State] = field(compare=False, repr=False)


def compute_digest(arrays: Mapping[str, Array]) -> str:
    """Of every byte, under which name and in which shape it stands."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


class MetricMeans:
    """The mean of each metric over the updates that reported it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def make_metrics(self) -> Metrics:
        return {name: total / count for name, (total, count) in self._sums.items()}


class Algorithm(Protocol[LearnsFrom]):
    """Weights and how a batch changes them. `progress` runs from 0 to 1 over the horizon."""

    def get_policy(self) -> PolicyArrays:
        """Copies of the arrays to ship: the actor, and the normaliser when there is one."""

    def update(self, batch: LearnsFrom, progress: float) -> Metrics: ...

    def get_state(self) -> State: ...

    def load_state(self, state: Mapping[str, Array]) -> None: ...


class Buffer(Protocol[Yields]):
    """What becomes of fragments before they are learned from."""

    def add(self, fragments: Sequence[Fragment], behaviour: PolicyArrays) -> None:
        """Take one iteration's fragments, in slot order, and the weights that acted."""

    def take_batches(self) -> Iterator[Yields]: ...

    def get_state(self) -> State:
        """All that is in no segment."""

    def list_segments(self) -> tuple[Segment, ...]:
        """With the state, all there is; each stays as it is for as long as it is needed."""

    def load_state(self, state: Mapping[str, Array], segments: Sequence[Segment]) -> None: ...


class GradientProvider(Protocol[MinibatchT]):
    """Where gradients of one algorithm's loss come from: numpy by hand, or torch's autograd.

    Both work on the same flat float32 vector and must agree to rounding.
    """

    def compute_gradient(self, minibatch: MinibatchT, count: int) -> tuple[Float32, Metrics]:
        """d(sum of the samples' losses / count)/d(parameters), and sums over the samples.

        `count` is the size of the whole minibatch, of which this may be one shard: gradients
        and sums of shards add up. The gradient is valid until the next call.
        """


@dataclass
class Counter:
    """A number that is saved. Counting is much faster than in an array."""

    value: int = 0


class StateParts:
    """What is saved, by name, and filled in place by `load_state`: arrays and counters.

    A part that a recipe does without is None. Integers are counts.
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
    """Copy a saved array into its place. One of another shape is refused, never broadcast."""
    values = state.get(name)
    if values is None or values.shape != target.shape or values.dtype != target.dtype:
        description = "missing" if values is None else f"{values.dtype} {values.shape}"
        raise LearningError(
            f"The saved learner's {name} is {description}, expected {target.dtype} {target.shape}.",
            "use a checkpoint of the same recipe",
        )
    target[...] = values


def restore_count(name: str, state: Mapping[str, Array]) -> int:
    """A saved counter, of as much as a run can have counted."""
    count = np.zeros((), np.int64)
    restore(count, name, state)
    _check_counts(count, name)
    return int(count)


def _check_counts(counts: Int64, name: str) -> None:
    if counts.min() < 0 or counts.max() >= _MAX_COUNT:
        raise LearningError(
            f"The saved learner's {name} is {counts}, and no run counts so far.",
            "use an earlier checkpoint of the same run",
        )
