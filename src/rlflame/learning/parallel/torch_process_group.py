"""The learners of one run over torch.distributed: gloo between processors, nccl between cards.

Imported only where several learners are asked for. Rank 0 waits for the others no longer than its
deadline; they wait for it as long as rollouts may take, and its death closes their connections.
Must not know: who started the processes, algorithms.
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

from rlflame.errors import LearnersLost
from rlflame.rollout import wire
from rlflame.rollout.spec import Float32

from ..base import digest_of

#: Longer than any run.
_ENDLESS_S = 365.0 * 24 * 3600


def backend_for(device: str, places: Sequence[bytes]) -> str:
    """What learners at these places exchange gradients by: nccl refuses two on one card."""
    shared = len(set(places)) < len(places)
    return "gloo" if device == "cpu" or shared else "nccl"


class TorchGroup:
    """This process among the learners; one group in a process at a time.

    The learners find each other through a `store`, or without one as torchrun's variables say.
    `exchanges` is how many this one has come to.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        deadline_s: float,
        joining_s: float,
        clock: Callable[[], float],
        store: Store | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.exchanges = 0
        self._deadline_s = deadline_s
        self._clock = clock
        self._device = torch.device("cpu")
        self._gathered: dict[int, torch.Tensor] = {}
        try:
            if store is not None:
                store.set_timeout(timedelta(seconds=joining_s))
            distributed.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=joining_s),
            )
            self._group = self._exchange = self._made("gloo")
        except (RuntimeError, ValueError) as error:
            _forget()
            raise LearnersLost(f"The {size} learners did not come together: {error}") from error

    def meet_on(self, device: str) -> None:
        here = f"{platform.node()} {device}".encode()
        place = np.frombuffer(
            bytearray.fromhex(digest_of({"place": np.frombuffer(here, np.uint8)})), np.float32
        )
        if backend_for(device, [row.tobytes() for row in self.gather(place)]) == "gloo":
            return
        self._device = torch.device(device)
        torch.cuda.set_device(self._device)
        self._gathered = {}
        self._exchange = self._made("nccl")

    def gather(self, mine: Float32) -> Float32:
        self.exchanges += 1
        began = self._clock()
        sent = torch.from_numpy(np.ascontiguousarray(mine).reshape(-1)).to(self._device)
        whole = self._gathered.get(mine.size)
        if whole is None:
            whole = torch.empty((self.size, mine.size), dtype=torch.float32, device=self._device)
            self._gathered[mine.size] = whole
        try:
            distributed.all_gather(list(whole), sent, group=self._exchange)
            found: Float32 = whole.cpu().numpy()
        except RuntimeError as error:
            raise self._lost(error, began) from error
        return found.reshape(self.size, *mine.shape)

    def share(self, value: Any) -> Any:
        self.exchanges += 1
        began = self._clock()
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
            raise self._lost(error, began) from error
        return value if self.rank == 0 else wire.decode(data.numpy().data)

    def close(self) -> None:
        distributed.destroy_process_group()

    def _made(self, backend: str) -> distributed.ProcessGroup:
        waiting_s = _ENDLESS_S if self.rank else min(self._deadline_s, _ENDLESS_S)
        group = distributed.new_group(backend=backend, timeout=timedelta(seconds=waiting_s))
        assert isinstance(group, distributed.ProcessGroup)
        return group

    def _lost(self, error: RuntimeError, began: float) -> LearnersLost:
        first = (str(error).strip().splitlines() or [""])[0]
        if self._clock() - began < self._deadline_s:
            return LearnersLost("A learner has ended.", detail=first)
        lost = LearnersLost(
            f"A learner {silent(self._deadline_s)}",
            detail=first,
        )
        lost.hung = True
        return lost


def silent(seconds: float) -> str:
    return f"has not answered for {seconds:g} s (runtime.learner_deadline_s)."


def _forget() -> None:
    """Torch numbers its groups, and a number that the others have not counted is one under which
    nobody meets: it begins again where the last group ends."""
    if not distributed.is_initialized():
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    distributed.destroy_process_group()
