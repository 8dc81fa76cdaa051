"""Computes the loss of SAC and its gradients in a few calls of compiled code.

In each call, the two lanes of `loss.py` run in two threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

from rlflame.rollout.task import Float32, PolicySpec

from ..kernels.library import (
    Kernels,
    SacLane,
    get_address,
    get_array_address,
    load_kernels,
    make_check_numbers,
)
from ..networks.compiled_mlp import CompiledWorkspace
from ..networks.flat_vector import FlatVector
from ..networks.heads import SquashedGaussianHead
from ..networks.mlp import MLP
from ..parallel.thread_pair import LANES, ThreadPair
from .loss import NumpySac, SacMinibatch
from .networks import SacNetworks

#: Gradients of minibatches with these numbers of rows are compared with those of numpy.
_CHECK_ROWS = 5, 64


class CompiledSac(NumpySac):
    """Computes the same bits as `NumpySac`, for critics without moments."""

    def __init__(self, networks: SacNetworks, thread_pair: ThreadPair, kernels: Kernels) -> None:
        self._kernels = kernels
        self._lanes = [SacLane() for _ in range(LANES)]
        self._addresses = [ctypes.addressof(lane) for lane in self._lanes]
        #: For each lane: the workspaces of its actor, critic and target.
        self._spaces: list[list[CompiledWorkspace]] = []
        #: For each lane: the noise, the noise times the standard deviations, and two more buffers.
        self._buffers: list[Float32] = [np.empty(0, np.float32)] * LANES
        #: The minibatch whose addresses the lanes contain.
        self._batch: SacMinibatch | None = None
        super().__init__(networks, thread_pair)

    def _resize(self, rows: int) -> None:
        super()._resize(rows)
        self._upstreams: Float32 = np.empty_like(self._values)
        networks = zip(self._actors, self._critics, self._targets, strict=True)
        spaces = [[network.prepare_workspace(rows) for network in lane] for lane in networks]
        self._spaces = [
            [space for space in lane if isinstance(space, CompiledWorkspace)] for lane in spaces
        ]
        if not self._is_compiled:
            return
        for number, lane in enumerate(self._lanes):
            lane.actor, lane.critic, lane.target = (space.address for space in self._spaces[number])
            lane.policy_actions, lane.next_policy_actions = map(get_address, self._actions)
            self._prepare_sample(number, lane)
            lane.upstream = get_address(self._upstreams[number])
            lane.action_slopes = get_address(self._slopes[number])

    def _prepare_sample(self, number: int, lane: SacLane) -> None:
        """Write the addresses for sampling, unless the noise depends on the state."""
        head = self._heads[number]
        lane.samples = isinstance(head, SquashedGaussianHead)
        if not isinstance(head, SquashedGaussianHead):
            return
        lane.lowest, lane.highest = head.limits
        lane.log_volume = head.log_volume
        arrays = self._buffers[number] = np.empty((4, *self._actions.shape[1:]), np.float32)
        lane.noise, lane.scaled_noise, lane.log_std, lane.slope = map(get_address, arrays)
        lane.lane_actions = get_address(self._actions[number])
        lane.log_probs = get_address(self._log_probs[number])

    @property
    def _is_compiled(self) -> bool:
        """Whether the kernels can compute the current number of rows."""
        return all(len(lane) == 3 for lane in self._spaces)

    def _run(self, name: str) -> None:
        self._kernels.run_lanes(self._thread_pair.helper, name, self._addresses)

    def _select(self, batch: SacMinibatch) -> None:
        """Write the addresses of a minibatch to the lanes."""
        if batch is self._batch:
            return
        observations = batch.observations, batch.next_observations
        current, following = map(get_array_address, observations)
        actions = get_array_address(batch.actions)
        for lane, address in zip(self._lanes, (current, following), strict=True):
            lane.actor_observations, lane.actions = address, actions
            lane.observations, lane.next_observations = current, following
        self._batch = batch

    def _sample(self, batch: SacMinibatch) -> None:
        if not (self._is_compiled and self._lanes[0].samples):
            super()._sample(batch)
            return
        for number in range(LANES):
            self._buffers[number][0] = batch.noise[number]
        out, _ = self._run_actors(batch)
        head = self._heads[0]
        assert isinstance(head, SquashedGaussianHead)
        head.use_sample(self._actions[0], self._buffers[0][1], out[self._action_size :])

    def _run_actors(self, batch: SacMinibatch) -> Sequence[Float32]:
        if not self._is_compiled:
            return super()._run_actors(batch)
        self._select(batch)
        self._run("sac_act")
        return [actor.out for actor, _, _ in self._spaces]

    def _evaluate_critics(self, batch: SacMinibatch) -> None:
        if not self._is_compiled:
            super()._evaluate_critics(batch)
            return
        self._select(batch)
        self._run("sac_evaluate_critic")
        for number, (_, critic, target) in enumerate(self._spaces):
            self._values[number], self._next_values[number] = critic.out, target.out

    def _backward_critics(self, target: Float32, count: int) -> None:
        if not self._is_compiled:
            super()._backward_critics(target, count)
            return

        def run_lane(number: int) -> None:
            self._upstreams[number] = self._compute_error(number, target, count)

        if self._critic_objective.outputs > 1:
            self._thread_pair.run(run_lane)
        else:
            for number in range(LANES):
                run_lane(number)
        self._run("sac_backward_critic")

    def _evaluate_actions(self, batch: SacMinibatch) -> None:
        if not self._is_compiled:
            super()._evaluate_actions(batch)
            return
        self._select(batch)
        self._run("sac_evaluate_actions")
        for number, (_, critic, _) in enumerate(self._spaces):
            self._values[number] = critic.out

    def _compute_action_slopes(self, upstreams: Sequence[Float32]) -> None:
        if not self._is_compiled:
            super()._compute_action_slopes(upstreams)
            return
        for number, upstream in enumerate(upstreams):
            self._upstreams[number] = upstream
        self._run("sac_compute_action_slopes")


def make_sac(networks: SacNetworks, thread_pair: ThreadPair) -> NumpySac:
    """Make a provider that uses the kernels if they compute the same bits as numpy."""
    kernels = load_kernels()
    shapes = tuple(networks.actor.shapes.items()), tuple(networks.critics.shapes.items())
    if (
        kernels is not None
        and networks.moments is None
        and _has_equal_results(networks.spec, networks.quantiles, kernels, *shapes)
    ):
        return CompiledSac(networks, thread_pair, kernels)
    return NumpySac(networks, thread_pair)


@functools.cache
def _has_equal_results(
    spec: PolicySpec,
    quantiles: int,
    kernels: Kernels,
    actor_shapes: tuple[tuple[str, tuple[int, ...]], ...],
    critic_shapes: tuple[tuple[str, tuple[int, ...]], ...],
) -> bool:
    """Return whether the kernels and numpy compute the same bits for varied numbers."""
    shapes = actor_shapes, critic_shapes, critic_shapes
    actor, critics, targets = (FlatVector(dict(items)) for items in shapes)
    for key, vector in enumerate((actor, critics, targets)):
        vector.data[:] = np.float32(0.1) * make_check_numbers(key, len(vector.data))
    networks = SacNetworks(spec, actor, critics, targets, quantiles=quantiles)
    thread_pair = ThreadPair(1)
    providers = (
        NumpySac(networks, thread_pair, MLP),
        CompiledSac(networks, thread_pair, kernels),
    )
    for rows in _CHECK_ROWS:
        rewards, bootstrap = make_check_numbers(3, 2, rows)
        batch = SacMinibatch(
            make_check_numbers(4, rows, spec.observation_size),
            make_check_numbers(5, rows, spec.action_size),
            rewards,
            make_check_numbers(6, rows, spec.observation_size),
            bootstrap,
            make_check_numbers(7, LANES, spec.action_size, rows),
        )
        results: list[list[object]] = [[], []]
        for provider, result in zip(providers, results, strict=True):
            result.append(provider.sample_actions(batch).tobytes())
            for compute in (provider.compute_critic_gradient, provider.compute_actor_gradient):
                gradient, sums = compute(batch, 0.1, rows)
                result += [gradient.tobytes(), sums]
        if results[0] != results[1]:
            return False
    return True
