"""Networks of a flat vector in torch, with their gradients in a second flat vector.

On the processor the leaf tensors are the vector's own memory: the next pass sees what Adam or a
checkpoint writes there. On a graphics card they are copies, brought up to date before a pass, and
their gradients are fetched after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflame.errors import ConfigError
from rlflame.rollout.task import Array, Float32

from .flat_vector import FlatVector, NetworkShape


def is_cuda_available() -> bool:
    return torch.cuda.is_available()


def read_gpu_name() -> str:
    """The name of the first graphics card."""
    return str(torch.cuda.get_device_name(0)) if is_cuda_available() else "none"


def select_device(kind: str, rank: int) -> str:
    """Where the learner of this rank computes: with several cards, each on the next one."""
    if kind != "cuda":
        return kind
    if not is_cuda_available():
        raise ConfigError(
            f"This recipe learns on CUDA, and torch {torch.__version__} finds no CUDA device here.",
            "--device cpu, in a new run: equal bits hold for one kind of device",
        )
    # Otherwise some sums on the card would be added in the order in which they are ready.
    torch.use_deterministic_algorithms(True)
    return f"cuda:{rank % torch.cuda.device_count()}"


class TorchNetworks:
    """The perceptrons of one flat vector."""

    def __init__(
        self,
        parameters: FlatVector,
        network: NetworkShape,
        device: str = "cpu",
        *,
        copied: bool | None = None,
    ) -> None:
        self._layers, self._tanh = network.layers, network.tanh
        self._parameters = torch.from_numpy(parameters.data)
        self._gradients = FlatVector(parameters.shapes)
        self._cpu_gradients = torch.from_numpy(self._gradients.data)
        self._device = torch.device(device)
        self._is_copied = self._device.type != "cpu" if copied is None else copied
        values, gradients = self._parameters, self._cpu_gradients
        if self._is_copied:
            values = torch.empty_like(self._parameters, device=self._device)
            gradients = torch.zeros_like(values)
        self._values, self._device_gradients = values, gradients
        self.tensors: dict[str, Tensor] = {}
        for name, shape in parameters.shapes.items():
            part = parameters.find_span(name)
            leaf = values[part].view(shape).requires_grad_()
            leaf.grad = gradients[part].view(shape)
            self.tensors[name] = leaf
        self.refresh()

    def refresh(self) -> None:
        """Take over the present contents of the vector."""
        if self._is_copied:
            with torch.no_grad():
                self._values.copy_(self._parameters)

    def make_tensor(self, array: Array) -> Tensor:
        """The array as a tensor on the same device."""
        return torch.as_tensor(array, device=self._device)

    def compute_gradient(self, loss: Tensor) -> Float32:
        """The gradient with respect to this vector; valid until the next call."""
        self._device_gradients.zero_()
        torch.autograd.backward(loss, inputs=list(self.tensors.values()))
        if self._is_copied:
            self._cpu_gradients.copy_(self._device_gradients)
        return self._gradients.data

    def compute_latent(self, prefix: str, x: Tensor) -> Tensor:
        """The input of the last layer."""
        for layer in range(self._layers - 1):
            x = self.apply_activation(self.apply_layer(prefix, layer, x))
        return x

    def compute_outputs(self, prefix: str, latent: Tensor) -> Tensor:
        """The outputs of the last layer."""
        return self.apply_layer(prefix, self._layers - 1, latent)

    def apply_activation(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self._tanh else torch.relu(x)

    def apply_layer(self, prefix: str, layer: int, x: Tensor) -> Tensor:
        weight = self.tensors[f"{prefix}.{layer}.weight"]
        return torch.addmm(self.tensors[f"{prefix}.{layer}.bias"], x, weight)
