"""Computes the gradients of PPO and REINFORCE with torch autograd.

This module is imported only if a recipe uses torch, because importing torch takes seconds. On the
CPU, the leaf tensors share the memory of the flat vector. On a GPU, they are copies: weights are
copied before each pass, and gradients after it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlflame.errors import ConfigError
from rlflame.rollout.distributions import (
    MASKED_LOGIT,
    VARIANCE_FLOOR,
    ActionGroup,
    find_choice_outputs,
    group_actions,
)
from rlflame.rollout.task import Array, Float32, PolicySpec

from .base import Metrics
from .networks.flat_vector import FlatVector
from .ppo.loss import NETWORKS, PpoMinibatch, PpoProvider
from .reinforce.reinforce import ReinforceMinibatch


def is_cuda_available() -> bool:
    return torch.cuda.is_available()


def read_gpu_name() -> str:
    """Return the name of the first GPU, or `none` if there is no GPU."""
    return str(torch.cuda.get_device_name(0)) if is_cuda_available() else "none"


def select_device(kind: str, rank: int) -> str:
    """Return the device for this rank; GPUs are assigned round-robin."""
    if kind != "cuda":
        return kind
    if not is_cuda_available():
        raise ConfigError(
            f"This recipe uses CUDA, but torch {torch.__version__} finds no CUDA device here.",
            "start a new run with --device cpu; results differ between kinds of devices",
        )
    # Otherwise, the order of some additions on the GPU varies from run to run.
    torch.use_deterministic_algorithms(True)
    # All memory is written before it is read, and filling it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return f"cuda:{rank % torch.cuda.device_count()}"


def set_precision(precision: str) -> None:
    """Let matrix products of float32 round their factors to TF32, or not."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def multiply(x: Tensor, weight: Tensor, bias: Tensor, precision: str) -> Tensor:
    """Return `x @ weight + bias` for matrices, or for batches of matrices."""
    if precision == "bf16":
        return (x.bfloat16() @ weight.bfloat16()).to(x.dtype) + bias
    if x.dim() == 3:
        return torch.baddbmm(bias, x, weight)
    return torch.addmm(bias, x, weight)


class TorchNetworks:
    """Torch networks whose weights come from a flat vector."""

    def __init__(
        self,
        parameters: FlatVector,
        spec: PolicySpec,
        device: str = "cpu",
        *,
        copies: bool | None = None,
        dtype: torch.dtype = torch.float32,
        precision: str = "float32",
    ) -> None:
        self._precision = precision
        self._layers, self._tanh = len(spec.hidden) + 1, spec.activation == "tanh"
        self._parameters = torch.from_numpy(parameters.data)
        self._gradients = FlatVector(parameters.shapes)
        self._cpu_gradients = torch.from_numpy(self._gradients.data)
        self._device = torch.device(device)
        is_elsewhere = self._device.type != "cpu" or dtype != torch.float32
        self._is_copied = is_elsewhere if copies is None else copies
        values, gradients = self._parameters, self._cpu_gradients
        if self._is_copied:
            values = torch.empty_like(self._parameters, device=self._device, dtype=dtype)
            gradients = torch.zeros_like(values)
        #: The weights, on the device.
        self.values = values
        self._device_gradients = gradients
        self.tensors: dict[str, Tensor] = {}
        for name, shape in parameters.shapes.items():
            part = parameters.find_span(name)
            leaf = values[part].view(shape).requires_grad_()
            leaf.grad = gradients[part].view(shape)
            self.tensors[name] = leaf
        self.refresh()

    def refresh(self) -> None:
        """Copy the weights from the vector, unless the tensors share its memory."""
        if self._is_copied:
            with torch.no_grad():
                self.values.copy_(self._parameters)

    def make_tensor(self, array: Array) -> Tensor:
        """Return the array as a tensor on the device of the networks."""
        return torch.as_tensor(array, device=self._device)

    def compute_gradient(self, loss: Tensor) -> Float32:
        """Return the gradient as a flat array, which the next call overwrites."""
        self._device_gradients.zero_()
        torch.autograd.backward(loss, inputs=list(self.tensors.values()))
        if self._is_copied:
            self._cpu_gradients.copy_(self._device_gradients)
        return self._gradients.data

    def compute_device_gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient as a new device tensor; CUDA graphs can capture this call."""
        leaves = list(self.tensors.values())
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def compute_latent(self, prefix: str, x: Tensor) -> Tensor:
        """Return the input of the last layer."""
        for layer in range(self._layers - 1):
            x = self.apply_activation(self.apply_layer(prefix, layer, x))
        return x

    def compute_outputs(self, prefix: str, latent: Tensor) -> Tensor:
        """Return the outputs of the last layer."""
        return self.apply_layer(prefix, self._layers - 1, latent)

    def apply_activation(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self._tanh else torch.relu(x)

    def apply_layer(self, prefix: str, layer: int, x: Tensor) -> Tensor:
        weight = self.tensors[f"{prefix}.{layer}.weight"]
        return multiply(x, weight, self.tensors[f"{prefix}.{layer}.bias"], self._precision)


class _TorchProvider:
    """Base class for computing the gradients of on-policy algorithms with torch."""

    def __init__(
        self,
        parameters: FlatVector,
        spec: PolicySpec,
        threads: int = 1,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        precision: str = "float32",
    ) -> None:
        # The recipe sets the number of threads, because the number affects the order of additions.
        torch.set_num_threads(threads)
        self.networks = TorchNetworks(parameters, spec, device, dtype=dtype, precision=precision)
        self._spec, self._groups = spec, group_actions(spec.action_counts)
        self._mask_columns = self.networks.make_tensor(_find_mask_columns(spec))

    def select_observations(self, rows: Tensor) -> Tensor:
        """Return the rows without any mask."""
        return rows[:, : self._spec.observation_size] if self._spec.mask_size else rows

    def _evaluate_actions(self, rows: Tensor, actions: Array) -> tuple[Tensor, Tensor]:
        """Return the log-density of each action, and the entropy of each distribution."""
        latent = self.networks.compute_latent("actor", self.select_observations(rows))
        action_tensor = self.networks.make_tensor(actions)
        out = self.networks.compute_outputs("actor", latent)
        if self._spec.mask_size:
            # The last column is 1 for every row. A CUDA graph cannot capture writes by index.
            masks = torch.cat(
                [rows[:, self._spec.observation_size :], torch.ones_like(rows[:, :1])], 1
            )
            is_allowed = masks.index_select(1, self._mask_columns) > 0
            out = torch.where(is_allowed, out, float(MASKED_LOGIT))
        log_std = self.networks.tensors.get("actor.log_std")
        if self._groups:
            return _evaluate_composite(self._groups, out, log_std, action_tensor)
        if log_std is None:
            return _evaluate_categorical(out, action_tensor)
        if log_std.dim() == 2:
            return _evaluate_gsde(out, latent.detach(), log_std, action_tensor)
        return _evaluate_gaussian(out, log_std, action_tensor)


def _find_mask_columns(spec: PolicySpec) -> Array:
    """Return the column of the mask for each output of the actor.

    Outputs that have no mask get the column after the last one.
    """
    columns = np.full(spec.output_size, spec.mask_size)
    if spec.mask_size:
        columns[find_choice_outputs(spec)] = np.arange(spec.mask_size)
    return columns


def _evaluate_categorical(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(logits, dim=1)
    # The gradient of `gather` would copy numbers from the CPU, which no CUDA graph can capture.
    is_action = actions[:, None] == torch.arange(logits.shape[1], device=logits.device)
    log_probs = torch.where(is_action, log_softmax, 0.0).sum(dim=1)
    return log_probs, -(log_softmax.exp() * log_softmax).sum(dim=1)


def _evaluate_gaussian(mean: Tensor, log_std: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    log_volume = log_std.sum() + 0.5 * len(log_std) * math.log(2.0 * math.pi)
    log_probs = -0.5 * ((actions - mean) / log_std.exp()).square().sum(dim=1) - log_volume
    return log_probs, (log_volume + 0.5 * len(log_std)).expand(len(mean))


def _evaluate_composite(
    groups: Sequence[ActionGroup], out: Tensor, log_std: Tensor | None, actions: Tensor
) -> tuple[Tensor, Tensor]:
    log_probs = entropies = torch.zeros_like(out[:, 0])
    first = 0
    for group in groups:
        outputs, columns = out[:, group.outputs], actions[:, group.columns]
        if group.count:
            logits = outputs.reshape(-1, group.count)
            choices = columns.reshape(-1).to(torch.int64)
            parts = _evaluate_categorical(logits, choices)
            terms, spreads = (part.view(len(out), -1).sum(dim=1) for part in parts)
        else:
            assert log_std is not None
            std = log_std[first : first + group.size]
            first += group.size
            terms, spreads = _evaluate_gaussian(outputs, std, columns)
        log_probs, entropies = log_probs + terms, entropies + spreads
    return log_probs, entropies


def _evaluate_gsde(
    mean: Tensor, latent: Tensor, log_std: Tensor, actions: Tensor
) -> tuple[Tensor, Tensor]:
    variance = latent.square() @ (2.0 * log_std).exp() + VARIANCE_FLOOR
    log_volume = 0.5 * (2.0 * math.pi * variance).log()
    log_probs = -0.5 * (actions - mean).square() / variance - log_volume
    return log_probs.sum(dim=1), (log_volume + 0.5).sum(dim=1)


class TorchPpo(_TorchProvider, PpoProvider):
    """The torch counterpart of `NumpyPpo`."""

    chunk_rows = sys.maxsize

    def compute_gradient(
        self, minibatch: PpoMinibatch, count: int, networks: Sequence[str] = tuple(NETWORKS)
    ) -> tuple[Float32, Metrics]:
        self.networks.refresh()
        loss, sums = self.compute_loss(minibatch, networks)
        gradient = self.networks.compute_gradient(loss / count)
        return gradient, {name: float(value) for name, value in sums.items()}

    def compute_loss(
        self, minibatch: PpoMinibatch, networks: Sequence[str] = tuple(NETWORKS)
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss of these networks, and the sums of their metrics."""
        observations = self.networks.make_tensor(minibatch.observations)
        losses: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        if "actor" in networks:
            loss, policy_sums = self._compute_policy_loss(minibatch, observations)
            losses.append(loss)
            sums |= policy_sums
        if "critic" in networks:
            value_loss = self._compute_value_losses(minibatch, observations).sum()
            losses.append(minibatch.value_weight * value_loss)
            sums["value_loss"] = value_loss.detach()
        return sum(losses[1:], losses[0]), sums

    def _compute_policy_loss(
        self, batch: PpoMinibatch, observations: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tensor = self.networks.make_tensor
        log_probs, entropies = self._evaluate_actions(observations, batch.actions)
        log_ratio = log_probs - tensor(batch.log_probs)
        ratio, advantages = log_ratio.exp(), tensor(batch.advantages)
        clipped_ratio = ratio.clamp(1.0 - batch.clip_range, 1.0 + batch.clip_range)
        objectives = torch.minimum(ratio * advantages, clipped_ratio * advantages)
        loss = -objectives.sum() - batch.entropy_weight * entropies.sum()
        with torch.no_grad():
            return loss, {
                "policy_gradient_loss": -objectives.sum(),
                "entropy_loss": -entropies.sum(),
                "approx_kl": (ratio - 1.0 - log_ratio).sum(),
                "clip_fraction": (clipped_ratio != ratio).sum(),
            }

    def compute_values(self, observations: Float32) -> Float32:
        self.networks.refresh()
        with torch.no_grad():
            values = self.estimate_values(self.networks.make_tensor(observations))
        result: Float32 = values.cpu().numpy()
        return result

    def estimate_values(self, rows: Tensor) -> Tensor:
        latent = self.networks.compute_latent("critic", self.select_observations(rows))
        return self.networks.compute_outputs("critic", latent)[:, 0]

    def _compute_value_losses(self, batch: PpoMinibatch, observations: Tensor) -> Tensor:
        values = self.estimate_values(observations)
        returns = self.networks.make_tensor(batch.returns)
        losses = (values - returns).square()
        limit = batch.clip_range_value
        if limit is None:
            return losses
        old = self.networks.make_tensor(batch.old_values)
        clipped_values = old + (values - old).clamp(-limit, limit)
        return torch.maximum(losses, (clipped_values - returns).square())


class TorchReinforce(_TorchProvider):
    """The torch counterpart of `NumpyReinforce`."""

    def compute_gradient(self, batch: ReinforceMinibatch, count: int) -> tuple[Float32, Metrics]:
        self.networks.refresh()
        loss, sums = self.compute_loss(batch)
        gradient = self.networks.compute_gradient(loss / count)
        return gradient, {name: float(value) for name, value in sums.items()}

    def compute_loss(self, batch: ReinforceMinibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss, and its parts."""
        tensor = self.networks.make_tensor
        log_probs, entropies = self._evaluate_actions(tensor(batch.observations), batch.actions)
        loss = -(log_probs * tensor(batch.weights)).sum()
        entropy = entropies.sum()
        sums = {"loss": loss.detach(), "entropy_loss": -entropy.detach()}
        return loss - batch.entropy_weight * entropy, sums
