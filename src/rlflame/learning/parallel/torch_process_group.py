"""A process group based on torch.distributed, with gloo for CPUs and NCCL for GPUs.

This module is imported only if torchrun starts several learners. Rank 0 waits for the others for at
most `deadline_s` seconds. The others wait as long as rollouts take; if rank 0 dies, their
connections are closed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed import Store  # type: ignore[attr-defined]

from rlflame.errors import LearnerFailure
from rlflame.rollout import wire
from rlflame.rollout.task import Float32

from .process_group import gather_digests

#: Longer than any run.
_ENDLESS_S = 365.0 * 24 * 3600
#: Buffers are kept for this many sizes of arrays.
_MAX_BUFFERS = 64


def select_backend(device: str, locations: Sequence[bytes]) -> str:
    """Return the backend for gradients. NCCL does not allow two learners on one GPU."""
    is_shared = len(set(locations)) < len(locations)
    return "gloo" if device == "cpu" or is_shared else "nccl"


class TorchProcessGroup:
    """Connects this process to a group of learners; a process has only one group.

    Learners connect through the `store` or, without one, through the address that torchrun sets.
    `exchange_count` is the number of exchanges that this learner has begun.
    """

    #: Learners may run on several machines.
    share_memory = None

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        deadline_s: float,
        join_timeout_s: float,
        clock: Callable[[], float],
        store: Store | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.exchange_count = 0
        self._deadline_s = deadline_s
        self._clock = clock
        self._device = torch.device("cpu")
        self._gather_buffers: dict[int, torch.Tensor] = {}
        try:
            if store is not None:
                store.set_timeout(timedelta(seconds=join_timeout_s))
            distributed.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=join_timeout_s),
            )
            self._group = self._exchange = self._make_group("gloo")
        except (RuntimeError, ValueError) as error:
            _reset_group_count()
            raise LearnerFailure(f"The {size} learners could not connect: {error}") from error

    def use_device(self, device: str) -> None:
        location = np.frombuffer(f"{platform.node()} {device}".encode(), np.uint8)
        if select_backend(device, gather_digests(self, {"place": location})) == "gloo":
            return
        self._device = torch.device(device)
        torch.cuda.set_device(self._device)
        self._gather_buffers = {}
        self._exchange = self._make_group("nccl")

    def gather(self, values: Float32) -> Float32:
        self.exchange_count += 1
        start_s = self._clock()
        parts = torch.from_numpy(np.ascontiguousarray(values).reshape(-1)).to(self._device)
        output = self._gather_buffers.get(values.size)
        if output is None:
            if len(self._gather_buffers) == _MAX_BUFFERS:  # whole episodes have many sizes
                self._gather_buffers.clear()
            output = torch.empty((self.size, values.size), dtype=torch.float32, device=self._device)
            self._gather_buffers[values.size] = output
        try:
            distributed.all_gather(list(output), parts, group=self._exchange)
            result: Float32 = output.cpu().numpy()
        except RuntimeError as error:
            raise self._make_lost_error(error, start_s) from error
        return result.reshape(self.size, *values.shape)

    def broadcast(self, value: Any) -> Any:
        self.exchange_count += 1
        start_s = self._clock()
        length = torch.zeros(1, dtype=torch.int64)
        data = torch.empty(0, dtype=torch.uint8)
        if self.rank == 0:
            data = torch.frombuffer(bytearray(wire.encode(value)), dtype=torch.uint8)
            length[0] = len(data)
        try:
            distributed.broadcast(length, 0, group=self._group)
            if self.rank:
                data = torch.empty(int(length), dtype=torch.uint8)
            distributed.broadcast(data, 0, group=self._group)
        except RuntimeError as error:
            raise self._make_lost_error(error, start_s) from error
        return value if self.rank == 0 else wire.decode(data.numpy().data)

    def close(self) -> None:
        distributed.destroy_process_group()

    def _make_group(self, backend: str) -> distributed.ProcessGroup:
        timeout_s = _ENDLESS_S if self.rank else min(self._deadline_s, _ENDLESS_S)
        group = distributed.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, distributed.ProcessGroup)
        return group

    def _make_lost_error(self, error: RuntimeError, start_s: float) -> LearnerFailure:
        first = (str(error).strip().splitlines() or [""])[0]
        if self._clock() - start_s < self._deadline_s:
            return LearnerFailure("A learner has ended.", detail=first)
        failure = LearnerFailure(f"A learner {format_timeout(self._deadline_s)}", detail=first)
        failure.is_hung = True
        return failure


def format_timeout(seconds: float) -> str:
    """Return the end of an error message about a learner that timed out."""
    return f"has not answered for {seconds:g} s (runtime.learner_deadline_s)."


def _reset_group_count() -> None:
    """Reset torch's group counter, which must be the same for all learners."""
    if not distributed.is_initialized():
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    distributed.destroy_process_group()
