"""How a machine is shared among seeds: how many side by side, and what each of them rolls out on.

Must not know: processes, files.
"""

from __future__ import annotations

from rlflame.console.sweep_base import SweepResources
from rlflame.storage.machine_memory import PROCESS_BYTES


def split_resources(
    seeds: int,
    *,
    cores: int,
    threads: int = 1,
    replay_bytes: int = 0,
    available_bytes: float = float("inf"),
    split: bool = True,
) -> SweepResources:
    """One process a core uses a machine best: nothing waits for anything. Where there are fewer
    seeds than cores, each gets workers from what is left over, if `split` allows."""
    fitting = int(min(available_bytes / (replay_bytes + PROCESS_BYTES), seeds))
    requested = min(seeds, max(1, cores // threads))
    at_once = max(1, min(requested, fitting))
    cores_per_seed = cores // at_once
    workers = cores_per_seed if split and cores_per_seed >= 2 and threads == 1 else 0
    return SweepResources(at_once, workers, memory_bound=at_once < requested)
