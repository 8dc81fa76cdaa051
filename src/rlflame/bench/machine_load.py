"""The machine that a benchmark runs on, and whether other programs use it meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlflame.fleet.factory import is_remote
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

    def format_sentences(self) -> list[str]:
        facts = self.machine
        packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
        threads = ", ".join(f"{name}={value}" for name, value in self.threads.items())
        load = " ".join(f"{value:.2f}" for value in self.load_before or ()) or "unknown"
        load_text = f"Load before: {load} (1, 5 and 15 minutes)"
        if self.at_work is not None:
            load_text += f"; {self.at_work:.1f} processors at work when it began"
        if self.others is not None:
            load_text += f"; {self.others:.1f} at work for others meanwhile"
        warning = "This machine was busy with other work: measure again when it is idle."
        return [
            f"{facts['processor']}, {facts['usable_cores']} of {facts['cores']} cores "
            f"usable, {format_size(facts['memory_bytes'])}; {facts['system']}, "
            f"{facts['libc']}, Python {facts['python']}; {packages}; BLAS {facts['blas']}.",
            f"Threads: {threads or 'as the libraries choose'}; one in each worker.",
            f"{load_text}.",
            *[warning] * self.busy,
        ]


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
    threads = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    facts = describe_machine()
    return MachineConditions(facts, threads, load_average, at_work, _is_busy(decisive))


class LoadMonitor:
    """Measures the work of other programs: that of all processors, less that of this process and
    its children. Executors of Flame are no children, so with that fleet there is no such figure."""

    def __init__(
        self, fleets: Collection[str] = (), conditions: MachineConditions | None = None
    ) -> None:
        self._conditions = conditions or read_conditions()
        self._start_counters = None if any(map(is_remote, fleets)) else _read_counters()

    def finish(self) -> MachineConditions:
        """The conditions until now; correct once all children have been waited for."""
        conditions, load = self._conditions, _compute_load(self._start_counters, _read_counters())
        if load is None:
            return conditions
        other_load = max(0.0, load[0] - load[1])
        return replace(conditions, others=other_load, busy=conditions.busy or _is_busy(other_load))


def _is_busy(processors: float) -> bool:
    """Whether other programs use enough processors to disturb a measurement."""
    return processors > max(0.5, _BUSY_SHARE * count_usable_cores())


def count_busy_processors(seconds: float = _SAMPLE_S) -> float | None:
    """How many processors are at work; None where the system does not tell."""
    before = _read_counters()
    time.sleep(seconds)
    load = _compute_load(before, _read_counters())
    return load[0] if load else None


_Counters = tuple[float, float, float] | None


def _read_counters() -> _Counters:
    """Seconds of the clock, of all processors, and of this process and its children."""
    try:
        # The fourth and the fifth are idle; those of guests are at work.
        values = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
        busy_s = (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return time.monotonic(), busy_s, sum(os.times()[:4])


def _compute_load(before: _Counters, now: _Counters) -> tuple[float, float] | None:
    """The processors at work between two looks: all of them, and those of this process."""
    if before is None or now is None or now[0] <= before[0]:
        return None
    seconds, busy_s, own_s = (b - a for a, b in zip(before, now, strict=True))
    return busy_s / seconds, own_s / seconds
