"""The machine that a benchmark runs on, and whether other programs use it meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlflame.rollout.blas import THREAD_VARIABLES
from rlflame.rollout.machine import count_usable_cores, describe_machine
from rlflame.terminal_text import format_size

#: The share of the usable processors at work above which a machine counts as busy.
_BUSY_SHARE = 0.25
_SAMPLE_S = 0.5
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class MachineConditions:
    """What a measured number has to be read with."""

    machine: dict[str, Any]
    threads: dict[str, str]
    load_before: tuple[float, float, float] | None
    #: Processors at work before the benchmark began; None where the system does not tell.
    at_work: float | None
    busy: bool
    #: Processors that other programs kept at work during the benchmark.
    others: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def format_sentences(self) -> list[str]:
        machine, load = self.machine, self.load_before
        packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
        threads = ", ".join(f"{name}={value}" for name, value in self.threads.items())
        loads = " ".join(f"{value:.2f}" for value in load) if load else "unknown"
        parts = [f"Load before: {loads} (1, 5 and 15 minutes)"]
        if self.at_work is not None:
            parts.append(f"{self.at_work:.1f} processors at work when it began")
        if self.others is not None:
            parts.append(f"{self.others:.1f} at work for others meanwhile")
        sentences = [
            f"{machine['processor']}, {machine['usable_cores']} of {machine['cores']} cores "
            f"usable, {format_size(machine['memory_bytes'])}; {machine['system']}, "
            f"{machine['libc']}, Python {machine['python']}; {packages}; BLAS {machine['blas']}.",
            f"Threads: {threads or 'as the libraries choose'}; one in each worker.",
            "; ".join(parts) + ".",
        ]
        if self.busy:
            sentences.append(
                "This machine was busy with other work: measure again when it is idle."
            )
        return sentences


def read_conditions(
    load: Callable[[], tuple[float, float, float]] = os.getloadavg,
    sample: Callable[[], float | None] | None = None,
) -> MachineConditions:
    """The conditions before anything is measured, when all work is that of other programs.

    A load average changes minutes after the work; it decides only where processors cannot be seen.
    """
    try:
        load_average: tuple[float, float, float] | None = load()
    except OSError:
        load_average = None
    at_work = (sample or count_busy_processors)()
    decisive = at_work if at_work is not None else load_average[0] if load_average else 0.0
    return MachineConditions(
        machine=describe_machine(),
        threads={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        load_before=load_average,
        at_work=at_work,
        busy=decisive > _compute_busy_limit(),
    )


class LoadMonitor:
    """Measures the work of other programs: that of all processors, less that of this process and
    its children. Executors of Flame are no children, so with that fleet there is no such figure."""

    def __init__(
        self, fleets: Collection[str] = (), conditions: MachineConditions | None = None
    ) -> None:
        self._conditions = conditions or read_conditions()
        self._start_counters = None if "flame" in fleets else _read_counters()

    def finish(self) -> MachineConditions:
        """The conditions until now; correct once all children have been waited for."""
        conditions, before, now = self._conditions, self._start_counters, _read_counters()
        if before is None or now is None or now[1] <= before[1]:
            return conditions
        busy_s, seconds, spent_s = (b - a for a, b in zip(before, now, strict=True))
        other_load = max(0.0, (busy_s - spent_s) / seconds)
        busy = conditions.busy or other_load > _compute_busy_limit()
        return replace(conditions, others=other_load, busy=busy)


def _compute_busy_limit() -> float:
    """How many processors other programs may use before the machine counts as busy."""
    return max(0.5, _BUSY_SHARE * count_usable_cores())


def count_busy_processors(seconds: float = _SAMPLE_S) -> float | None:
    """How many processors are at work; None where the system does not tell."""
    before = _read_counters()
    time.sleep(seconds)
    after = _read_counters()
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def _read_counters() -> tuple[float, float, float] | None:
    """Seconds of all processors, of the clock, and of this process and its children."""
    try:
        # The fourth and the fifth are idle; those of guests are at work.
        values = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
        busy_s = (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return busy_s, time.monotonic(), sum(os.times()[:4])
