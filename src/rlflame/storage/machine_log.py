"""What the processes that trained in a folder ran on: machines.json, an entry for each.

Must not know: the loop, how runs are shown.
"""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from typing import Any

from rlflame import __version__
from rlflame.errors import CheckpointError, RlflameError
from rlflame.fleet.base import Fleet
from rlflame.storage import machine_info, run_files
from rlflame.storage.run_dir import RunFolder, report_disk_errors
from rlflame.storage.safetensors_file import write_atomically


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
            "machine": machine_info.describe_machine(),
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
            entries = run_files.parse_json(run_files.read_text(self._folder.path / "machines.json"))
        except (ValueError, CheckpointError):
            return []
        return entries if isinstance(entries, list) else []


def _group_workers(fleet: Fleet) -> list[dict[str, Any]]:
    """What the workers said they are, alike ones together with their number."""
    groups: dict[str, dict[str, Any]] = {}
    for worker in fleet.probe().workers:
        facts = {name: value for name, value in worker.items() if name not in ("name", "pid")}
        group = groups.setdefault(json.dumps(facts, sort_keys=True), {"number": 0, **facts})
        group["number"] += 1
    return [*groups.values()]
