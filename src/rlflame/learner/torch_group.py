"""The learners of one run over torch.distributed: gloo between processors.

Imported only where several learners are asked for. Rank 0 waits for the others no longer than its
deadline; they wait for it as long as rollouts may take, and its death closes their connections.
Must not know: who started the processes, algorithms.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed

from rlflame.errors import LearnersLost
from rlflame.rollout import wire
from rlflame.rollout.spec import Array, Float32

#: Longer than any run.
_ENDLESS_S = 365.0 * 24 * 3600


class TorchGroup:
    """This process among the learners; one group in a process at a time.

    With a `file` the learners find each other there; without, as torchrun's variables say.
    `arrivals` is a file of a number for each learner, how often it has come to an exchange: so
    that the first one can say for whom it has waited in vain.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        deadline_s: float,
        joining_s: float,
        file: str | None = None,
        arrivals: str | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._deadline_s = deadline_s
        self._gathered: dict[int, Float32] = {}
        self._arrived: Array = np.zeros(size, np.int64)
        if arrivals is not None:
            self._arrived = np.memmap(arrivals, np.int64, "r+", shape=(size,))
        try:
            distributed.init_process_group(
                "gloo",
                init_method="env://" if file is None else f"file://{file}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=joining_s),
            )
            waiting_s = _ENDLESS_S if rank else deadline_s
            group = distributed.new_group(timeout=timedelta(seconds=waiting_s))
            assert isinstance(group, distributed.ProcessGroup)
            self._group = group
        except (RuntimeError, ValueError) as error:
            raise LearnersLost(f"The {size} learners did not come together: {error}") from error

    def gather(self, mine: Float32) -> Float32:
        self._arrived[self.rank] += 1
        whole = self._gathered.get(mine.size)
        if whole is None:
            whole = self._gathered[mine.size] = np.empty((self.size, mine.size), np.float32)
        sent = torch.from_numpy(np.ascontiguousarray(mine).reshape(-1))
        try:
            distributed.all_gather(list(torch.from_numpy(whole)), sent, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return whole.reshape(self.size, *mine.shape)

    def share(self, value: Any) -> Any:
        self._arrived[self.rank] += 1
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
            raise self._lost(error) from error
        return value if self.rank == 0 else wire.decode(data.numpy().data)

    def close(self) -> None:
        distributed.destroy_process_group()

    def _lost(self, error: RuntimeError) -> LearnersLost:
        first = (str(error).strip().splitlines() or [""])[0]
        waited = f"for {self._deadline_s:g} s (runtime.learner_deadline_s)."
        late = [rank for rank in range(self.size) if self._arrived[rank] < self._arrived[self.rank]]
        if not self._arrived.all() or not late:
            who = "A learner has ended, or has"
        elif len(late) == 1:
            who = f"Learner {late[0]} of {self.size} has"
        else:
            named = ", ".join(map(str, late[:-1]))
            who = f"Learners {named} and {late[-1]} of {self.size} have"
        return LearnersLost(f"{who} not answered {waited}", detail=first)
