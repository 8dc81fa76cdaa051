"""The network of a policy with its action distribution, for learning."""

from __future__ import annotations

import numpy as np

from rlflame.rollout.distributions import MASKED_LOGIT, find_choice_outputs
from rlflame.rollout.task import Array, Float32, PolicySpec

from .flat_vector import FlatVector
from .heads import Sum, make_head
from .mlp import MLP, MakeNetwork


class Actor:
    """Computes the log-probabilities of actions, their entropies and their gradients.

    Rows are normalised observations, followed by any action mask. Choices that a mask forbids have
    probability 0 and no gradient.
    """

    def __init__(
        self,
        parameters: FlatVector,
        gradients: FlatVector,
        spec: PolicySpec,
        make_network: MakeNetwork = MLP,
    ) -> None:
        layers, tanh = len(spec.hidden) + 1, spec.activation == "tanh"
        self.network = make_network(parameters, gradients, "actor", layers, tanh)
        self._head = make_head(parameters, gradients, self.network, spec.action_counts)
        self._size = spec.observation_size
        self._choice_outputs = find_choice_outputs(spec) if spec.mask_size else None

    def log_prob(self, rows: Float32, actions: Array) -> Float32:
        outputs = self._choice_outputs
        if outputs is None:
            return self._head.log_prob(self.network.forward(rows), actions)
        out = self.network.forward(rows[..., : self._size])
        masks = rows[..., self._size :].mT
        # The softmax of a forbidden choice is exactly 0, and so is the gradient of its logit.
        out[..., outputs, :] = np.where(masks > 0, out[..., outputs, :], MASKED_LOGIT)
        return self._head.log_prob(out, actions)

    def sum_entropy(self) -> Sum:
        """Return the sum of the entropies of the latest rows."""
        return self._head.sum_entropy()

    def backward(self, d_log_prob: Float32, d_entropy: float) -> None:
        """Write the gradients, given d(loss)/d(log_prob) and d(loss)/d(entropy)."""
        self.network.backward(self._head.backward(d_log_prob, d_entropy))
