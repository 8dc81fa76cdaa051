"""REINFORCE (Williams, 1992), which makes actions with high returns more likely.

The algorithm takes one gradient step per batch of whole episodes, on the loss

    L = sum over samples of (-log pi(a|s) G - entropy_weight H) / n

where G is the discounted reward-to-go, normalised as set by `normalise_returns`, H is the entropy
of pi(.|s), and n is the number of steps or episodes, depending on `average`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlflame.config.algorithms import ReinforceSettings
from rlflame.rollout.task import Array, Float32, Float64, PolicyArrays, PolicySpec

from ..base import Batch, Counter, GradientProvider, Metrics, State, StateParts
from ..buffers.rollout_buffer import compute_continued_returns, compute_discounted_returns
from ..networks.actor import Actor
from ..networks.compiled_mlp import make_mlp
from ..networks.flat_vector import FlatVector, make_training_metrics, normalise_batch
from ..networks.mlp import CHUNK_ROWS
from ..normalization import make_normaliser, make_policy
from ..optim import GradientGuard, apply_schedule, clip_by_norm, make_adam
from ..parallel.process_group import Shard, Shards

_EPSILON = 1e-8


@dataclass(slots=True)
class ReinforceMinibatch:
    """A minibatch of samples, with the weights of their log-probabilities."""

    observations: Float32
    actions: Array
    weights: Float32
    entropy_weight: float


class NumpyReinforce:
    """Computes the REINFORCE loss and its gradient in numpy."""

    def __init__(self, parameters: FlatVector, spec: PolicySpec) -> None:
        self._gradients = FlatVector(parameters.shapes)
        self._actor = Actor(parameters, self._gradients, spec, make_mlp)

    def compute_gradient(self, batch: ReinforceMinibatch, count: int) -> tuple[Float32, Metrics]:
        log_probs = self._actor.log_prob(batch.observations, batch.actions)
        d_log_prob = batch.weights * np.float32(-1.0 / count)
        self._actor.backward(d_log_prob, -batch.entropy_weight / count)
        return self._gradients.data, {
            "loss": -float(np.dot(log_probs, batch.weights)),
            "entropy_loss": -float(self._actor.sum_entropy()),
        }


class Reinforce:
    """REINFORCE, which takes one Adam step per iteration."""

    def __init__(
        self,
        settings: ReinforceSettings,
        spec: PolicySpec,
        parameters: FlatVector,
        provider: GradientProvider[ReinforceMinibatch],
        shards: Shards | None = None,
    ) -> None:
        self._settings = settings
        self.shards = shards or Shards()
        self._spec = spec
        self._parameters = parameters
        self._provider = provider
        self._adam = make_adam(len(parameters.data), settings.adam_epsilon)
        self._gradient = np.zeros_like(parameters.data)
        self._normaliser = make_normaliser(spec)
        self._updates = Counter()
        self._guard = GradientGuard("reinforce")
        self._state = StateParts(
            parameters=parameters.data,
            updates=self._updates,
            guard=self._guard.counts,
            adam=self._adam.state,
            normaliser=None if self._normaliser is None else self._normaliser.state,
        )

    def get_policy(self) -> PolicyArrays:
        return make_policy(self._parameters, self._normaliser)

    @np.errstate(over="ignore", invalid="ignore")  # the guard checks the result
    def update(self, batch: Batch, progress: float) -> Metrics:
        settings = self._settings
        learning_rate = apply_schedule(
            settings.learning_rate, settings.anneal_learning_rate, progress
        )
        ends = batch.terminated | batch.truncated
        if settings.continue_truncated:
            returns = compute_continued_returns(
                batch.rewards, batch.terminated, batch.truncated, batch.valid, settings.discount
            )
        else:
            returns = compute_discounted_returns(batch.rewards, ends, settings.discount)
        weights = normalise_returns(returns, batch, settings.normalise_returns)
        count = batch.steps if settings.average == "steps" else int(ends.sum())
        metrics: Metrics = {}
        step = self._take_step(batch, weights, count, learning_rate)
        if step is not None:
            sums, norm = step
            loss = sums["loss"] + settings.entropy_weight * sums["entropy_loss"]
            metrics = {
                "loss": loss / count,
                "entropy_loss": sums["entropy_loss"] / batch.steps,
                "gradient_norm": norm,
            }
        self.shards.compare_states()
        return {
            **metrics,
            **make_training_metrics(self._parameters, learning_rate, self._updates.value),
            "refused_minibatches": float(self._guard.counts[0]),
        }

    def get_state(self) -> State:
        return self._state.get_state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._state.load_state(state)

    def _take_step(
        self, batch: Batch, weights: Float64, count: int, learning_rate: float
    ) -> tuple[Metrics, float] | None:
        """Take one optimizer step; return the sums of the losses and the gradient's norm.

        Return None if the gradient was not finite. Update the statistics of observations in any
        case.
        """
        normalised = normalise_batch(batch, self._spec)
        if self._normaliser is not None:
            self._normaliser.merge(batch.observations[batch.valid])
        gradient, sums = self._compute_gradient(normalised, weights, count)
        norm = clip_by_norm(gradient, self._settings.max_gradient_norm)
        if self._guard.is_refused(norm, sums):
            return None
        self._adam.step(self._parameters.data, gradient, learning_rate)
        self._updates.value += 1
        return sums, norm

    def _compute_gradient(
        self, batch: Batch, weights: Float64, count: int
    ) -> tuple[Float32, Metrics]:
        """Return the batch's gradient and metric sums, added in a fixed order."""
        valid = batch.valid
        observations, actions = batch.observations[valid], batch.actions[valid]
        shares = weights[valid].astype(np.float32)

        def compute_part(shard: Shard) -> tuple[Float32, Metrics]:
            self._gradient[:] = 0.0
            totals: Metrics = {}
            for start in range(shard.rows.start, shard.rows.stop, CHUNK_ROWS):
                rows = slice(start, min(start + CHUNK_ROWS, shard.rows.stop))
                minibatch = ReinforceMinibatch(
                    observations[rows], actions[rows], shares[rows], self._settings.entropy_weight
                )
                gradient, sums = self._provider.compute_gradient(minibatch, count)
                self._gradient += gradient
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + value
            return self._gradient, totals

        return self.shards.compute_gradient(len(shares), compute_part)


def normalise_returns(returns: Float64, batch: Batch, scope: str) -> Float64:
    """Standardise returns if `scope` is `batch` or `episode`; otherwise copy them."""
    result = returns.copy()
    if scope == "batch":
        samples = returns[batch.valid]
        result -= samples.mean()
        result /= samples.std() + _EPSILON
    elif scope == "episode":
        for column, length in enumerate(batch.valid.sum(axis=0)):
            if length > 1:
                episode = result[:length, column]
                # n - 1 degrees of freedom, which is the default of `torch.std`.
                episode -= episode.mean()
                episode /= episode.std(ddof=1) + _EPSILON
    return result
