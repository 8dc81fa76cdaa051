"""Learning from a batch in two halves: the actor in one process, the critic in another one.

What the two networks need of each other is little: the advantages that the critic's values make of
the rewards; the norm of the whole gradient, by which it is clipped; and the sums that say whether
a minibatch is refused or the last one. So each process computes one network from the first to the
last operation and steps it by itself; after every minibatch they exchange a few numbers, and at
the end of a batch the actor's is given what the critic has become. The bits are those of one
process. Must not know: how numbers travel, how processes begin and end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from rlflame.rollout.task import Array, Float32

from ..base import Algorithm, Batch, GradientProvider, Metrics
from ..networks.flat_vector import FlatVector
from ..optim import compute_square_norm
from ..parallel.gradient_shards import Shard, Shards
from .loss import NumpyPpo, PpoMinibatch

#: The networks, and the sums that come with the gradient of each.
HALVES = {
    "actor": ("policy_gradient_loss", "entropy_loss", "approx_kl", "clip_fraction"),
    "critic": ("value_loss",),
}


class Peer(Protocol):
    """Whoever has the other half. Each of these raises where it is gone."""

    def exchange(self, outgoing: Array, incoming: Array) -> None:
        """Give the one, and fill the other with what the partner gives at the same time."""

    def send(self, outgoing: Array) -> None: ...

    def receive(self, incoming: Array) -> None: ...


class SplitAlgorithm(Algorithm[Batch], Protocol):
    """An algorithm of two networks, of which it can learn one alone."""

    def start_split(self, name: str, peer: Peer) -> None:
        """From now on learn this network only, for as long as the partner learns the other."""

    def stop_split(self) -> None:
        """From now on learn both."""


def find_parts(parameters: FlatVector) -> dict[str, slice]:
    """Where each network stands in the flat vector."""
    return {name: parameters.find_span(f"{name}.") for name in HALVES}


def compute_norm(squares: Sequence[float]) -> float:
    """Of a gradient of which the networks' squares are given, in the order of `HALVES`."""
    return math.sqrt(squares[0] + squares[1])


class UpdateStrategy(Protocol):
    """What of the work on a batch is done here."""

    part: slice
    #: Whether the actor is learned here, and with it what else a policy consists of.
    has_actor: bool

    def compute_gradient(
        self, minibatch: PpoMinibatch, count: int
    ) -> tuple[Float32, float, Metrics]:
        """The gradient, of which `part` counts; the norm of all of it; the sums of all."""

    def compute_estimates(self, compute: Callable[[], Float32], shape: tuple[int, ...]) -> Float32:
        """What the critic has to say, as `compute` says it where the critic is."""

    def complete_batch(self, vectors: Sequence[Float32]) -> None:
        """The batch is learned from; vectors of all weights are brought up to date."""


class LocalUpdate:
    """Both networks are learned here, if not by other learners as well."""

    part = slice(None)
    has_actor = True

    def __init__(
        self, provider: GradientProvider[PpoMinibatch], shards: Shards, parameters: FlatVector
    ) -> None:
        self._provider = provider
        self._shards = shards
        self._parts = [*find_parts(parameters).values()]

    def compute_gradient(
        self, minibatch: PpoMinibatch, count: int
    ) -> tuple[Float32, float, Metrics]:
        def compute_shard(shard: Shard) -> tuple[Float32, Metrics]:
            return self._provider.compute_gradient(minibatch.select_rows(shard.rows), count)

        gradient, sums = self._shards.compute_gradient(count, compute_shard)
        return (
            gradient,
            compute_norm([compute_square_norm(gradient[part]) for part in self._parts]),
            sums,
        )

    def compute_estimates(self, compute: Callable[[], Float32], shape: tuple[int, ...]) -> Float32:
        return compute()

    def complete_batch(self, vectors: Sequence[Float32]) -> None:
        """There is nobody else."""


class SplitUpdate:
    """One of the networks, and a partner that has the other one."""

    def __init__(
        self,
        name: str,
        provider: NumpyPpo,
        parameters: FlatVector,
        peer: Peer,
    ) -> None:
        self._name = name
        self.has_actor = name == "actor"
        self._provider = provider
        self._peer = peer
        spans = find_parts(parameters)
        self.part = spans[name]
        self._critic = spans["critic"]
        # A half's numbers: the square of its gradient, and its sums.
        self._numbers = {half: np.empty(1 + len(sums)) for half, sums in HALVES.items()}
        self._peer_half = next(half for half in HALVES if half != name)

    def compute_gradient(
        self, minibatch: PpoMinibatch, count: int
    ) -> tuple[Float32, float, Metrics]:
        gradient, sums = self._provider.compute_half_gradient(self._name, minibatch, count)
        half_numbers = self._numbers[self._name]
        half_numbers[0] = compute_square_norm(gradient[self.part])
        half_numbers[1:] = [sums[name] for name in HALVES[self._name]]
        self._peer.exchange(half_numbers, self._numbers[self._peer_half])
        numbers_by_half = {half: numbers.tolist() for half, numbers in self._numbers.items()}
        norm = compute_norm([numbers[0] for numbers in numbers_by_half.values()])
        names = (name for sums_of in HALVES.values() for name in sums_of)
        values = (value for numbers in numbers_by_half.values() for value in numbers[1:])
        return gradient, norm, dict(zip(names, values, strict=True))

    def compute_estimates(self, compute: Callable[[], Float32], shape: tuple[int, ...]) -> Float32:
        if self._name == "critic":
            estimates = compute()
            self._peer.send(estimates)
        else:
            estimates = np.empty(shape, np.float32)
            self._peer.receive(estimates)
        return estimates

    def complete_batch(self, vectors: Sequence[Float32]) -> None:
        critic = [vector[self._critic] for vector in vectors]
        if self._name == "critic":
            self._peer.send(np.stack(critic))
            return
        critic_values = np.empty((len(critic), len(critic[0])), np.float32)
        self._peer.receive(critic_values)
        for vector, values in zip(critic, critic_values, strict=True):
            vector[:] = values
