"""The contract of learning: how fragments change weights.

An Algorithm is complete in its `state()`. Whether learning is on- or off-policy is a property of
the Experience, which decides what batches a new set of fragments owes. Must not know:
environments, files, clocks, budgets, fleets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflame.rollout.spec import Array, Float32, Float64, Fragment, PolicyArrays

#: Tensors by name, as they stand in a checkpoint.
State = dict[str, Array]
Metrics = dict[str, float]
MinibatchT = TypeVar("MinibatchT", contravariant=True)


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
    boundary_index: NDArray[np.int64]
    boundary_observations: Float32
    #: The weights that acted, normaliser included.
    behaviour: PolicyArrays

    @property
    def steps(self) -> int:
        return int(self.valid.sum())


class Algorithm(Protocol):
    """Weights and how a batch changes them. `progress` runs from 0 to 1 over the horizon."""

    def policy(self) -> PolicyArrays:
        """Copies of the arrays to ship: the actor, and the normaliser when there is one."""

    def update(self, batch: Batch, progress: float) -> Metrics: ...

    def state(self) -> State: ...

    def load_state(self, state: Mapping[str, Array]) -> None: ...


class Experience(Protocol):
    """What becomes of fragments before they are learned from."""

    def add(self, fragments: Sequence[Fragment], behaviour: PolicyArrays) -> None:
        """Take one iteration's fragments, in slot order, and the weights that acted."""

    def batches(self) -> Iterator[Batch]: ...

    def state(self) -> State: ...

    def load_state(self, state: Mapping[str, Array]) -> None: ...


class Provider(Protocol[MinibatchT]):
    """Where gradients of one algorithm's loss come from: numpy by hand, or torch's autograd.

    Both work on the same flat float32 vector and must agree to rounding.
    """

    def gradient(self, minibatch: MinibatchT, count: int) -> tuple[Float32, Metrics]:
        """d(sum of the samples' losses / count)/d(parameters), and sums over the samples.

        `count` is the size of the whole minibatch, of which this may be one shard: gradients
        and sums of shards add up. The gradient is valid until the next call.
        """

    def values(self, observations: Float32) -> Float32:
        """The critic's estimate for each normalised observation; zeros without a critic."""
