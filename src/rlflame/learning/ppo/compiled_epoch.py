"""Runs PPO's loop over the minibatches of an epoch in compiled code.

The loop ends early at a minibatch that `ppo.py` must handle: one that is shorter than the others,
one whose gradient is not finite, or one whose KL estimate exceeds the limit. It runs in a single
learner, or in two learners that compute all shards of one network each and exchange the norms of
their gradients through shared memory. All shards must have the same number of rows.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from rlflame.config.algorithms import PpoSettings
from rlflame.rollout.task import Float32, PolicySpec

from ..kernels.library import (
    EpochFields,
    Kernels,
    Mailbox,
    get_address,
    load_kernels,
    make_check_numbers,
)
from ..networks.flat_vector import FlatVector
from ..optim import SWEEP, Adam, CompiledAdam, clip
from ..parallel.process_group import Shard, Shards, SharedMemory
from ..parallel.units import ShardGradients, Units
from .compiled_loss import CompiledPpo, make_check_actions
from .loss import (
    NETWORKS,
    LossMeans,
    NumpyPpo,
    PpoMinibatch,
    PpoProvider,
    compute_norm,
    find_kl_limit,
    find_spans,
)

#: The largest number of minibatches in one call of compiled code.
_CALL_MINIBATCHES = 16
#: The bytes of shared memory for each learner.
MEMORY_SIZE = ctypes.sizeof(Mailbox)
#: The result of the compiled loop if the other learner is late.
_LATE = 1


class CompiledEpoch:
    """Computes the same bits as the loop in `ppo.py`."""

    def __init__(
        self,
        settings: PpoSettings,
        parameters: FlatVector,
        provider: CompiledPpo,
        adam: CompiledAdam,
        units: Units,
        kernels: Kernels,
    ) -> None:
        self._settings, self._provider, self._adam = settings, provider, adam
        self._units, self._kernels = units, kernels
        self._memory: SharedMemory | None = None
        limit, kl_limit = settings.max_gradient_norm, find_kl_limit(settings)
        spans, shards = find_spans(parameters).values(), units.shard_count
        #: The sum of the gradients of several shards.
        self._total = np.empty_like(provider.gradient) if shards > 1 else provider.gradient
        self._fields = EpochFields(
            log_volume_constant=provider.log_volume_constant,
            parameters=get_address(parameters.data),
            gradient=get_address(provider.gradient),
            total=get_address(self._total),
            shards=shards,
            first=get_address(adam.first),
            second=get_address(adam.second),
            starts=tuple(span.start for span in spans),
            ends=tuple(span.stop for span in spans),
            has_max_norm=limit is not None,
            max_norm=limit or 0.0,
            has_kl_limit=kl_limit is not None,
            kl_limit=kl_limit or 0.0,
        )
        self._address = ctypes.addressof(self._fields)

    def run(
        self, samples: PpoMinibatch, start: int, totals: LossMeans, learning_rate: float
    ) -> int:
        """Learn from the minibatches that begin at row `start`; return how many there were."""
        size = self._settings.minibatch_size
        count = (len(samples.returns) - start) // size
        fields, names = self._fields, tuple(self._units.own_names)
        shard_rows, surplus = divmod(size, fields.shards)
        if count < 1 or surplus or not self._find_learners():
            return 0
        space = self._provider.prepare_space(shard_rows)
        if space is None:
            return 0
        rows = samples.select_rows(slice(start, start + count * size))
        self._provider.write_minibatch(fields.samples, rows, shard_rows, size, names)
        fields.networks[:] = space.actor, space.critic
        fields.head, fields.losses = space.head, space.losses
        fields.owns[:] = [name in names for name in NETWORKS]
        rates, epsilons = self._make_rates(count, learning_rate)
        fields.rates, fields.epsilons = get_address(rates), get_address(epsilons)
        fields.steps, fields.position = self._adam.count.value, 0
        for row, sums in zip(fields.totals, NETWORKS.values(), strict=True):
            row[1 : 1 + len(sums)] = [totals.sums.get(name, 0.0) for name in sums]
        self._run_all(count)
        steps = int(fields.position)
        if steps:
            self._adam.count.value += steps
            totals.samples += steps * size
            totals.norm = fields.norm
            for row, sums in zip(fields.totals, NETWORKS.values(), strict=True):
                totals.sums |= zip(sums, row[1:], strict=False)
        return steps

    def _run_all(self, count: int) -> None:
        """Run the loop to its end; sleep while the other learner is late."""
        fields = self._fields
        fields.waits = fields.count = 0
        # Between two calls, Python handles signals.
        while fields.position == fields.count < count:
            fields.count = min(fields.count + _CALL_MINIBATCHES, count)
            while self._kernels.run_epoch(self._address) == _LATE:
                if self._memory is not None:
                    self._memory.wait_until(self._has_message)

    def _has_message(self) -> bool:
        """Return whether the other learner has sent the numbers of the current minibatch."""
        inbox = Mailbox.from_address(self._fields.inbox)
        return bool(inbox.exchange >= self._fields.exchange)

    def _find_learners(self) -> bool:
        """Find the memory of the other learner; return whether the loop can run."""
        units, fields = self._units, self._fields
        if units.is_alone:
            fields.outbox = fields.inbox = None
            return True
        memory = units.memory
        if memory is not self._memory:
            self._memory, fields.exchange = memory, 0
        if memory is None:
            return False
        addresses = [get_address(row) for row in memory.rows]
        if "actor" not in units.own_names:
            addresses.reverse()
        fields.outbox, fields.inbox = addresses
        return True

    def _make_rates(self, count: int, learning_rate: float) -> tuple[Float32, Float32]:
        """Return the rates and epsilons of the next steps of Adam."""
        steps = range(self._adam.count.value + 1, self._adam.count.value + count + 1)
        pairs = [self._adam.compute_rates(step, learning_rate) for step in steps]
        rates, epsilons = zip(*pairs, strict=True)
        return np.array(rates, np.float32), np.array(epsilons, np.float32)


def make_compiled_epoch(
    settings: PpoSettings,
    spec: PolicySpec,
    parameters: FlatVector,
    provider: PpoProvider,
    adam: Adam,
    units: Units,
) -> CompiledEpoch | None:
    """Make a compiled loop if it computes the same bits as numpy, or return None."""
    kernels = load_kernels()
    if (
        kernels is None
        or not isinstance(provider, CompiledPpo)
        or not isinstance(adam, CompiledAdam)
        or not _has_equal_results(
            settings, spec, kernels, tuple(parameters.shapes.items()), units.shard_count
        )
    ):
        return None
    return CompiledEpoch(settings, parameters, provider, adam, units, kernels)


@functools.cache
def _has_equal_results(
    settings: PpoSettings,
    spec: PolicySpec,
    kernels: Kernels,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    shard_count: int,
) -> bool:
    """Return whether the compiled loop and numpy compute the same bits for varied numbers."""
    rows, count, learning_rate = 8 * shard_count, 3, 1e-3
    settings = settings.model_copy(update={"minibatch_size": rows, "target_kl": None})
    vectors = FlatVector(dict(shapes)), FlatVector(dict(shapes))
    for vector in vectors:
        vector.data[:] = np.float32(0.1) * make_check_numbers(0, len(vector.data))
    size, epsilon = len(vectors[0].data), settings.adam_epsilon
    optimizers = Adam(size, epsilon), CompiledAdam(size, epsilon, kernels)
    for adam in optimizers:
        adam.count.value = SWEEP - 2  # the second step sets small moments to zero
    log_probs, advantages, returns, old_values = make_check_numbers(3, 4, count * rows)
    samples = PpoMinibatch(
        make_check_numbers(1, count * rows, spec.observation_size),
        make_check_actions(spec, count * rows),
        log_probs - spec.action_size, advantages, returns, old_values, 0.2,
        settings.clip_range_value, settings.value_weight, settings.entropy_weight,
    )  # fmt: skip
    means = LossMeans(settings), LossMeans(settings)
    spans = find_spans(vectors[0])
    units = [Units(Shards(shard_count), spans, NETWORKS) for _ in vectors]
    numpy_provider = NumpyPpo(vectors[0], spec)
    for number in range(count):
        minibatch = samples.select_rows(slice(number * rows, (number + 1) * rows))
        compute_parts = functools.partial(_compute_parts, numpy_provider, minibatch)
        gradient, squares, sums = units[0].compute_gradient(rows, compute_parts)
        norm = compute_norm(squares)
        means[0].add(rows, sums, norm)
        clip(gradient, norm, settings.max_gradient_norm)
        optimizers[0].step(vectors[0].data, gradient, learning_rate)
    provider = CompiledPpo(vectors[1], spec, kernels)
    loop = CompiledEpoch(settings, vectors[1], provider, optimizers[1], units[1], kernels)
    steps = loop.run(samples, 0, means[1], learning_rate)
    results = [
        (vector.data.tobytes(), adam.first.tobytes(), adam.second.tobytes(), mean.make_metrics(1))
        for vector, adam, mean in zip(vectors, optimizers, means, strict=True)
    ]
    return steps == count and results[0] == results[1]


def _compute_parts(
    provider: NumpyPpo, minibatch: PpoMinibatch, shards: Sequence[Shard], networks: Sequence[str]
) -> Iterator[ShardGradients]:
    return provider.compute_shards(minibatch, len(minibatch.returns), networks, shards)
