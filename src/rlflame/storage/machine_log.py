"""Facts of this machine, its processors' time, and their record in a run folder, machines.json."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

from rlflame import __version__
from rlflame.errors import CheckpointError, RlflameError
from rlflame.fleet.base import Fleet
from rlflame.rollout import blas
from rlflame.rollout.machine import count_usable_cores, describe_host
from rlflame.storage import record_reader
from rlflame.storage.run_folder import RunFolder, report_disk_errors
from rlflame.storage.safetensors_file import write_atomically

_FACT_NAMES = ("host", "processor", "memory_bytes", "system", "libc", "python", "packages")
_TASKS_PATH = "/proc/self/task"
#: Differences that can change bits; the rest of a fingerprint is for the reader.
_BIT_FIELDS = ("core", "simd", "system", "libc", "numpy", "gymnasium", "mujoco", "box2d")
#: The same of gradients, compared where both sides have them. Acting needs neither.
_GRADIENT_FIELDS = ("torch", "cpu_vendor", "card")


def describe_machine() -> dict[str, Any]:
    """The facts that a number measured here should be read with."""
    facts = describe_host()
    return {
        **{name: facts[name] for name in _FACT_NAMES},
        "cores": os.cpu_count() or 1,
        "usable_cores": count_usable_cores(),
        "blas": blas.read_core_name(),
    }


def find_fingerprint_differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """What differs between two machines that can change bits, as `name: one -> other`."""
    return [
        f"{name}: {a.get(name, '?')} -> {b.get(name, '?')}"
        for name in (*_BIT_FIELDS, *(name for name in _GRADIENT_FIELDS if name in a and name in b))
        if a.get(name) != b.get(name)
    ]


def read_children_cpu_s() -> float | None:
    """Processor seconds of the processes begun by this one; None where the system does not tell.

    Asked after every iteration, so it reads the system's files without ceremony.
    """
    try:
        pids = [word for task in os.listdir(_TASKS_PATH) for word in _list_children(task)]
    except OSError:
        return None
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + sum(map(_read_cpu_s, pids))


def _list_children(task: str) -> list[str]:
    """A system without the file raises; a thread that has just ended has no children."""
    try:
        return _read_file(f"{_TASKS_PATH}/{task}/children").split()
    except FileNotFoundError:
        if os.path.exists(f"{_TASKS_PATH}/{task}"):
            raise
        return []


def _read_cpu_s(process: str) -> float:
    """Its own and its ended children's; nothing once it has ended itself."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may hold anything; utime is the twelfth word after it.
        fields = _read_file(f"/proc/{process}/stat").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _read_file(path: str) -> str:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16).decode(errors="replace")
    finally:
        os.close(file)


class MachineLog:
    """This process's entry, and those of the processes before it."""

    def __init__(self, folder: RunFolder, fleet: Fleet, steps: int) -> None:
        self._folder = folder
        self._fleet = fleet
        self._previous_entries = self._read_entries()
        self._entry: dict[str, Any] = {
            "steps": steps,
            "began_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "rlflame": __version__,
            "fleet": fleet.name,
            "capacity": fleet.capacity,
            "machine": describe_machine(),
            "workers": [],
            "critic_helper_batches": None,
        }
        self._write()

    def record_work(self, helper_batches: int) -> None:
        """Once there was some: before, workers may not have come yet. Of so many batches a
        critic helper has learned half."""
        self._entry["critic_helper_batches"] = helper_batches
        # Which fleet it is may have been decided on the way.
        self._entry["fleet"], self._entry["capacity"] = self._fleet.name, self._fleet.capacity
        with contextlib.suppress(RlflameError):  # facts beside the point, at the end of a run
            self._entry["workers"] = _group_workers(self._fleet)
        self._write()

    def _write(self) -> None:
        text = json.dumps([*self._previous_entries, self._entry], indent=1) + "\n"
        with report_disk_errors(self._folder.path):
            self._folder.check()
            write_atomically(self._folder.path / "machines.json", text.encode())

    def _read_entries(self) -> list[Any]:
        try:
            text = record_reader.read_text(self._folder.path / "machines.json")
            return TypeAdapter(list[Any]).validate_json(text)
        except (ValueError, CheckpointError):
            return []


def _group_workers(fleet: Fleet) -> list[dict[str, Any]]:
    """The facts of the workers; equal ones together with their number."""
    groups: dict[str, dict[str, Any]] = {}
    for worker in fleet.probe().workers:
        facts = {name: value for name, value in worker.items() if name not in ("name", "pid")}
        group = groups.setdefault(json.dumps(facts, sort_keys=True), {"number": 0, **facts})
        group["number"] += 1
    return [*groups.values()]
