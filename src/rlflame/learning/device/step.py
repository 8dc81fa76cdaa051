"""A step on a device, the state that it changes, and Adam.

A step must not wait for the host. Whatever depends on data, such as a gradient that is not finite,
is therefore a mask: the step always computes everything and keeps only what the mask allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlflame.rollout.task import Array

from ..base import Counter
from ..optim import BETA_1, BETA_2, Adam, GradientGuard

#: A graph is captured after this many steps, in which torch allocates what it needs.
_WARM_UP_STEPS = 3


class Mirror:
    """Tensors on the device that replace arrays and counters of the host during updates."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self._pairs: list[tuple[Array | Counter, Tensor]] = []

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self._pairs]

    def add(self, host: Array | Counter) -> Tensor:
        """Return a tensor for this array or counter; float32 becomes the mirror's dtype."""
        if isinstance(host, Counter):
            tensor = torch.zeros((), dtype=torch.int64, device=self.device)
        else:
            wide = torch.from_numpy(host)
            dtype = self.dtype if wide.dtype == torch.float32 else wide.dtype
            tensor = torch.zeros(wide.shape, dtype=dtype, device=self.device)
        return self.add_pair(host, tensor)

    def add_pair(self, host: Array | Counter, tensor: Tensor) -> Tensor:
        """Let `tensor` replace this array or counter."""
        self._pairs.append((host, tensor))
        return tensor

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of zeros that only the device has."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    @torch.no_grad()
    def upload(self) -> None:
        """Copy the host's arrays and counters to the device."""
        for host, tensor in self._pairs:
            if isinstance(host, Counter):
                tensor.fill_(host.value)
            else:
                tensor.copy_(torch.from_numpy(host))

    def download(self) -> None:
        """Copy the device's tensors to the host."""
        for host, tensor in self._pairs:
            if isinstance(host, Counter):
                host.value = int(tensor)
            else:
                np.copyto(host, tensor.cpu().numpy(), casting="same_kind")


class DeviceStep:
    """A function that changes only the tensors of `list_state`, and returns nothing.

    On a GPU, the function is captured as a CUDA graph before the first step and then replayed.
    """

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        list_state: Callable[[], Sequence[Tensor]],
        *,
        captures: bool = True,
    ) -> None:
        self._function, self._device, self._list_state = function, device, list_state
        self._captures = captures and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        if not self._captures:
            self._function()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Warm up on a side stream, undo what the warm-up changed, and capture the graph."""
        state = self._list_state()
        with torch.no_grad():
            copies = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                self._function()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        with torch.no_grad():
            for tensor, copy in zip(state, copies, strict=True):
                tensor.copy_(copy)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._function()
        return graph


class DeviceAdam:
    """Adam on a flat tensor, with the state of a host's `Adam`."""

    def __init__(self, adam: Adam, mirror: Mirror) -> None:
        self._epsilon = adam.epsilon
        self._first, self._second = mirror.add(adam.first), mirror.add(adam.second)
        self._count = mirror.add(adam.count)

    @torch.no_grad()
    def step(self, values: Tensor, gradient: Tensor, rate: Tensor, allowed: Tensor) -> None:
        """Take a step where the mask `allowed` is true; `rate` is a float64 tensor."""
        self._count += allowed
        count = self._count.to(torch.float64)
        correction = (1.0 - BETA_2**count).sqrt()
        epsilon = (self._epsilon * correction).to(values.dtype)
        scale = (rate * correction / (1.0 - BETA_1**count)).to(values.dtype)
        first = self._first + (gradient - self._first) * (1.0 - BETA_1)
        second = self._second + (gradient.square() - self._second) * (1.0 - BETA_2)
        values -= torch.where(allowed, first / (second.sqrt() + epsilon) * scale, 0.0)
        self._first.copy_(torch.where(allowed, first, self._first))
        self._second.copy_(torch.where(allowed, second, self._second))


class DeviceGuard:
    """Counts gradients that are not finite, as the host's `GradientGuard` does."""

    def __init__(self, guard: GradientGuard, mirror: Mirror) -> None:
        self._guard = guard
        self._counts = mirror.add(guard.counts)
        #: The most in a row, and the norm of the latest one, since `check`.
        self._most = mirror.zeros(dtype=torch.int64)
        self._norm = mirror.zeros(dtype=torch.float64)

    @property
    def tensors(self) -> list[Tensor]:
        return [self._counts, self._most, self._norm]

    def accept(self, norm: Tensor, sums: Sequence[Tensor], active: Tensor) -> Tensor:
        """Return whether all numbers are finite; count a refusal if `active` is true."""
        values = torch.stack([norm, *sums])
        finite = torch.isfinite(values).all()
        refused = active & ~finite
        in_a_row = torch.where(finite, 0, self._counts[1] + 1)
        self._counts[0] += refused
        self._counts[1] = torch.where(active, in_a_row, self._counts[1])
        self._norm.copy_(torch.where(refused, norm.to(torch.float64), self._norm))
        self._most.copy_(torch.maximum(self._most, self._counts[1]))
        return active & finite

    def check(self) -> None:
        """Raise the guard's error if too many gradients in a row were refused."""
        if int(self._most) >= self._guard.limit:
            raise self._guard.make_error(int(self._most), float(self._norm))
        self._most.zero_()


def clip(gradient: Tensor, norm: Tensor, max_norm: float | None) -> Tensor:
    """Return the gradient scaled to at most `max_norm`, where `norm` is its norm."""
    if max_norm is None:
        return gradient
    scale = torch.where(norm > max_norm, max_norm / (norm + 1e-6), 1.0)
    return gradient * scale.to(gradient.dtype)
