"""An update on a device, and the state that it changes.

An update must not wait for the host. A decision that depends on data, such as whether to skip a
gradient that is not finite, is therefore a mask: the update computes everything and keeps only what
the mask allows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlflame.rollout.task import Array

from ..base import Counter

#: A graph is captured after this many runs, in which torch allocates what it needs.
_WARM_UP_RUNS = 3


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

    def make_zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of zeros without a counterpart on the host."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    @torch.no_grad()
    def copy_to_device(self) -> None:
        """Copy the host's arrays and counters to the device."""
        for host, tensor in self._pairs:
            if isinstance(host, Counter):
                tensor.fill_(host.value)
            else:
                tensor.copy_(torch.from_numpy(host))

    def copy_to_host(self, *hosts: Array | Counter) -> None:
        """Copy the device's tensors to these arrays and counters, or to all if none is given."""
        for host, tensor in self._pairs:
            if hosts and not any(host is item for item in hosts):
                continue
            if isinstance(host, Counter):
                host.value = int(tensor)
            else:
                np.copyto(host, tensor.cpu().numpy(), casting="same_kind")


class UpdateGraph:
    """Runs a function that returns None and changes only tensors in `state`.

    On a GPU, the function is captured as a CUDA graph before the first run and then replayed.
    """

    def __init__(self, device: torch.device, *, captures: bool = True) -> None:
        self._device = device
        self._captures = captures and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, function: Callable[[], None], state: Sequence[Tensor]) -> None:
        """Run the function; every call must pass the same function and tensors."""
        if not self._captures:
            function()
            return
        # A capture uses the current device, whatever the device of the tensors.
        with torch.cuda.device(self._device):
            if self._graph is None:
                self._graph = self._capture(function, state)
            self._graph.replay()

    def _capture(
        self, function: Callable[[], None], state: Sequence[Tensor]
    ) -> torch.cuda.CUDAGraph:
        """Warm up on a side stream, undo what the warm-up changed, and capture the graph."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            warm_up(function, state)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Freeing the memory of another graph would end the capture.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph):
                function()
        finally:
            if was_enabled:
                gc.enable()
        return graph


def warm_up(function: Callable[[], None], state: Sequence[Tensor]) -> None:
    """Run the function several times, and undo what each run changes."""
    with torch.no_grad():
        copies = [tensor.clone() for tensor in state]
    for _ in range(_WARM_UP_RUNS):
        function()
        # Undo each run: two in a row could read behind the end of a buffer.
        with torch.no_grad():
            for tensor, copy in zip(state, copies, strict=True):
                tensor.copy_(copy)
