"""Computes SAC's losses and their hand-derived gradients in numpy.

The work is divided into two halves, which can run in two threads (see `ThreadPair`): the actor on
the current and on the next observations, and then the two critics. Arrays have the layout `[units,
rows]`, as in `networks/mlp.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlflame.rollout.task import Float32

from ..base import Metrics
from ..networks.compiled_mlp import make_mlp
from ..networks.flat_vector import FlatVector
from ..networks.heads import make_sampling_head
from ..networks.mlp import MLP, BatchNormMLP, MakeNetwork
from ..parallel.thread_pair import LANES, ThreadPair
from .networks import CRITICS, SacNetworks, make_critic_loss


@dataclass(frozen=True, slots=True)
class SacMinibatch:
    """Transitions with normalised observations, and the noise for sampling actions."""

    observations: Float32
    actions: Float32
    rewards: Float32
    next_observations: Float32
    bootstrap: Float32
    #: `[2, action, batch]`: noise for `observations` and for `next_observations`.
    noise: Float32

    def select_rows(self, rows: slice) -> SacMinibatch:
        return SacMinibatch(
            self.observations[rows],
            self.actions[rows],
            self.rewards[rows],
            self.next_observations[rows],
            self.bootstrap[rows],
            self.noise[:, :, rows],
        )


class SacGradientProvider(Protocol):
    """Computes the gradients of the losses in `sac.py`, in numpy or with torch.

    Call `sample_actions` first. A gradient is valid until the next call. `count` is the size of the
    whole minibatch. `batch` may be one shard of it; the gradients and sums of all shards add up.
    """

    def sample_actions(self, batch: SacMinibatch) -> Float32:
        """Sample current and next actions; return the current actions' log-densities."""

    def compute_critic_gradient(
        self, batch: SacMinibatch, entropy_weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        """Return the critics' gradient; store any batch moments in `moments.latest`."""

    def compute_actor_gradient(
        self, batch: SacMinibatch, entropy_weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        """Return the gradient of the actor for the current critics."""


class NumpySac:
    """Computes the losses of SAC and their gradients in numpy.

    If critics have moments, each critic evaluates current and next observations in one batch,
    standardised together, so it needs no target network (CrossQ; Bhatt et al., 2024).
    """

    def __init__(
        self,
        networks: SacNetworks,
        thread_pair: ThreadPair,
        make_network: MakeNetwork = make_mlp,
    ) -> None:
        spec, moments = networks.spec, networks.moments
        shape = len(spec.hidden) + 1, spec.activation == "tanh"
        self._thread_pair = thread_pair
        self._critic_objective = make_critic_loss(networks.quantiles, networks.drop_count)
        self._observation_size = spec.observation_size
        self._action_size = spec.action_size
        self._critic_gradients = gradients = FlatVector(networks.critics.shapes)
        self._critics: list[MLP]
        self._targets: list[MLP] = []
        if moments is None:
            self._critics, self._targets = (
                [make_network(vector, gradients, prefix[:-1], *shape) for prefix in CRITICS]
                for vector in (networks.critics, networks.targets)
            )
        else:
            self._critics = [
                BatchNormMLP(networks.critics, gradients, moments, prefix[:-1], *shape)
                for prefix in CRITICS
            ]
        self._actor_gradients = FlatVector(networks.actor.shapes)
        self._actors = [
            make_network(networks.actor, self._actor_gradients, "actor", *shape)
            for _ in range(LANES)
        ]
        self._heads = [
            make_sampling_head(networks.actor, self._actor_gradients, actor, self._action_size)
            for actor in self._actors
        ]
        self._resize(0)

    def _resize(self, rows: int) -> None:
        self._actions: Float32 = np.empty((LANES, self._action_size, rows), np.float32)
        self._log_probs: Float32 = np.empty((LANES, rows), np.float32)
        shape = (LANES, self._critic_objective.outputs, rows)
        self._values: Float32 = np.empty(shape, np.float32)
        self._next_values: Float32 = np.empty(shape, np.float32)
        self._slopes: Float32 = np.empty((LANES, self._action_size, rows), np.float32)
        self._squares = np.empty(LANES, np.float64)

    def sample_actions(self, batch: SacMinibatch) -> Float32:
        if self._values.shape[-1] != len(batch.rewards):
            self._resize(len(batch.rewards))
        self._sample(batch)
        first: Float32 = self._log_probs[0]
        return first

    def compute_critic_gradient(
        self, batch: SacMinibatch, entropy_weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        self._evaluate_critics(batch)
        # The target is the right-hand side of the Bellman equation.
        target = self._critic_objective.compute_target_values(self._next_values)
        target -= np.float32(entropy_weight) * self._log_probs[1]
        target *= batch.bootstrap
        target += batch.rewards
        self._backward_critics(target, count)
        critic_loss = 0.5 * float(self._squares[0] + self._squares[1])
        return self._critic_gradients.data, {"critic_loss": critic_loss}

    def _sample(self, batch: SacMinibatch) -> None:
        """Write sampled actions and their log-densities to `_actions` and `_log_probs`."""
        # Use one thread, because two threads slow down many small operations.
        for number, out in enumerate(self._run_actors(batch)):
            sample = self._heads[number].sample(out, batch.noise[number])
            self._actions[number], self._log_probs[number] = sample

    def _run_actors(self, batch: SacMinibatch) -> Sequence[Float32]:
        """Return the actor's outputs for current and next observations."""
        observations = (batch.observations, batch.next_observations)
        outs: list[Float32] = [self._actions] * LANES

        def run_lane(number: int) -> None:
            outs[number] = self._actors[number].forward(observations[number])

        self._thread_pair.run(run_lane)
        return outs

    def _evaluate_critics(self, batch: SacMinibatch) -> None:
        """Write the critics' values to `_values` and `_next_values`."""
        self._thread_pair.run(lambda number: self._evaluate_critic(number, batch))

    def _evaluate_critic(self, number: int, batch: SacMinibatch) -> None:
        critic = self._critics[number]
        if not isinstance(critic, BatchNormMLP):
            self._next_values[number] = self._compute_value(
                self._targets[number], batch.next_observations, self._actions[1]
            )
            self._values[number] = self._compute_value(critic, batch.observations, batch.actions.T)
            return
        size, rows = self._observation_size, len(batch.rewards)
        inputs = critic.prepare_inputs(2 * rows)
        inputs[:size, :rows] = batch.observations.T
        inputs[size:, :rows] = batch.actions.T
        inputs[:size, rows:] = batch.next_observations.T
        inputs[size:, rows:] = self._actions[1]
        values = critic.run_batch()
        self._values[number] = values[:, :rows]
        self._next_values[number] = values[:, rows:]

    def _backward_critics(self, target: Float32, count: int) -> None:
        """Write the critics' gradients; values of next observations have no gradient."""

        def run_lane(number: int) -> None:
            slope = self._compute_error(number, target, count)
            if not self._targets:
                slope = np.concatenate((slope, np.zeros_like(slope)), axis=1)
            self._critics[number].backward(slope)

        self._thread_pair.run(run_lane)

    def _compute_error(self, number: int, target: Float32, count: int) -> Float32:
        """Return d(loss)/d(values) of one critic; write its squared error to `_squares`."""
        slope, self._squares[number] = self._critic_objective.compute_error(
            self._values[number], target, count
        )
        return slope

    def compute_actor_gradient(
        self, batch: SacMinibatch, entropy_weight: float, count: int
    ) -> tuple[Float32, Metrics]:
        self._evaluate_actions(batch)
        upstreams, value_sum = self._critic_objective.compute_slopes(self._values, count)
        self._compute_action_slopes(upstreams)
        slopes = np.add(*self._slopes)
        upstream, latent_gradient = self._heads[0].backward(slopes, entropy_weight / count)
        self._actors[0].backward_in_threads(self._thread_pair, upstream, latent_gradient)
        entropy_part = entropy_weight * float(self._log_probs[0].sum(dtype=np.float64))
        return self._actor_gradients.data, {"actor_loss": entropy_part - value_sum}

    def _evaluate_actions(self, batch: SacMinibatch) -> None:
        """Write the values of the sampled actions to `_values`."""

        def run_lane(number: int) -> None:
            self._values[number] = self._compute_value(
                self._critics[number], batch.observations, self._actions[0]
            )

        self._thread_pair.run(run_lane)

    def _compute_action_slopes(self, upstreams: Sequence[Float32]) -> None:
        """Write d(loss)/d(action) through each critic to `_slopes`."""

        def run_lane(number: int) -> None:
            self._slopes[number] = self._critics[number].compute_input_gradient(
                upstreams[number], self._observation_size
            )

        self._thread_pair.run(run_lane)

    def _compute_value(self, critic: MLP, observations: Float32, actions: Float32) -> Float32:
        inputs = critic.prepare_inputs(len(observations))
        inputs[: self._observation_size] = observations.T
        inputs[self._observation_size :] = actions
        return critic.run()
