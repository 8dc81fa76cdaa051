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

from rlflame.rollout.spec import Array, Float32

from ..base import Algorithm, Batch, Metrics, Provider
from ..networks.flat_params import FlatVector, square_of
from ..parallel.gradient_shards import Shard, Shards
from .loss import Minibatch, NumpyPpo

#: The networks, and the sums that come with the gradient of each.
HALVES = {
    "actor": ("policy_gradient_loss", "entropy_loss", "approx_kl", "clip_fraction"),
    "critic": ("value_loss",),
}


class Partner(Protocol):
    """Whoever has the other half. Each of these raises where it is gone."""

    def exchange(self, mine: Array, theirs: Array) -> None:
        """Give the one, and fill the other with what the partner gives at the same time."""

    def give(self, mine: Array) -> None: ...

    def take(self, theirs: Array) -> None: ...


class InHalves(Algorithm[Batch], Protocol):
    """An algorithm of two networks, of which it can learn one alone."""

    def share(self, name: str, partner: Partner) -> None:
        """From now on learn this network only, for as long as the partner learns the other."""

    def stay_alone(self) -> None:
        """From now on learn both."""


def parts(parameters: FlatVector) -> dict[str, slice]:
    """Where each network stands in the flat vector."""
    return {name: parameters.span(f"{name}.") for name in HALVES}


def norm_of(squares: Sequence[float]) -> float:
    """Of a gradient of which the networks' squares are given, in the order of `HALVES`."""
    return math.sqrt(squares[0] + squares[1])


class Work(Protocol):
    """What of the work on a batch is done here."""

    part: slice
    #: Whether the actor is learned here, and with it what else a policy consists of.
    acts: bool

    def gradient(self, minibatch: Minibatch, count: int) -> tuple[Float32, float, Metrics]:
        """The gradient, of which `part` counts; the norm of all of it; the sums of all."""

    def estimates(self, make: Callable[[], Float32], shape: tuple[int, ...]) -> Float32:
        """What the critic has to say, as `make` says it where the critic is."""

    def complete(self, vectors: Sequence[Float32]) -> None:
        """The batch is learned from; vectors of all weights are brought up to date."""


class Whole:
    """Both networks are learned here, if not by other learners as well."""

    part = slice(None)
    acts = True

    def __init__(
        self, provider: Provider[Minibatch], shards: Shards, parameters: FlatVector
    ) -> None:
        self._provider = provider
        self._shards = shards
        self._parts = [*parts(parameters).values()]

    def gradient(self, minibatch: Minibatch, count: int) -> tuple[Float32, float, Metrics]:
        def of(shard: Shard) -> tuple[Float32, Metrics]:
            return self._provider.gradient(minibatch.part(shard.rows), count)

        gradient, sums = self._shards.gradient(count, of)
        return gradient, norm_of([square_of(gradient[part]) for part in self._parts]), sums

    def estimates(self, make: Callable[[], Float32], shape: tuple[int, ...]) -> Float32:
        return make()

    def complete(self, vectors: Sequence[Float32]) -> None:
        """There is nobody else."""


class Half:
    """One of the networks, and a partner that has the other one."""

    def __init__(
        self,
        name: str,
        provider: NumpyPpo,
        parameters: FlatVector,
        partner: Partner,
    ) -> None:
        self._name = name
        self.acts = name == "actor"
        self._provider = provider
        self._partner = partner
        places = parts(parameters)
        self.part = places[name]
        self._critic = places["critic"]
        # A half's numbers: the square of its gradient, and its sums.
        self._numbers = {half: np.empty(1 + len(sums)) for half, sums in HALVES.items()}
        self._theirs = next(half for half in HALVES if half != name)

    def gradient(self, minibatch: Minibatch, count: int) -> tuple[Float32, float, Metrics]:
        gradient, sums = self._provider.half(self._name, minibatch, count)
        mine = self._numbers[self._name]
        mine[0] = square_of(gradient[self.part])
        mine[1:] = [sums[name] for name in HALVES[self._name]]
        self._partner.exchange(mine, self._numbers[self._theirs])
        found = {half: numbers.tolist() for half, numbers in self._numbers.items()}
        norm = norm_of([numbers[0] for numbers in found.values()])
        names = (name for sums_of in HALVES.values() for name in sums_of)
        values = (value for numbers in found.values() for value in numbers[1:])
        return gradient, norm, dict(zip(names, values, strict=True))

    def estimates(self, make: Callable[[], Float32], shape: tuple[int, ...]) -> Float32:
        if self._name == "critic":
            found = make()
            self._partner.give(found)
        else:
            found = np.empty(shape, np.float32)
            self._partner.take(found)
        return found

    def complete(self, vectors: Sequence[Float32]) -> None:
        critic = [vector[self._critic] for vector in vectors]
        if self._name == "critic":
            self._partner.give(np.stack(critic))
            return
        found = np.empty((len(critic), len(critic[0])), np.float32)
        self._partner.take(found)
        for vector, values in zip(critic, found, strict=True):
            vector[:] = values
