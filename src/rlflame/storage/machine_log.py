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
from rlflame.storage.run_dir import RunFolder, writing
from rlflame.storage.safetensors_file import write_atomically


class MachineLog:
    """This process's entry, and those of the processes before it."""

    def __init__(self, folder: RunFolder, fleet: Fleet, steps: int) -> None:
        self._folder = folder
        self._fleet = fleet
        self._before = self._entries()
        self._entry: dict[str, Any] = {
            "steps": steps,
            "began_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "rlflame": __version__,
            "fleet": fleet.name,
            "capacity": fleet.capacity,
            "machine": machine_info.describe(),
            "workers": [],
            "companion_batches": None,
        }
        self._write()

    def note_work(self, companion_batches: int) -> None:
        """Once there was some: before, workers may not have come yet. Of so many batches a
        companion has learned half."""
        self._entry["companion_batches"] = companion_batches
        # Which fleet it is may have been decided on the way.
        self._entry["fleet"], self._entry["capacity"] = self._fleet.name, self._fleet.capacity
        with contextlib.suppress(RlflameError):  # facts beside the point, at the end of a run
            self._entry["workers"] = _alike(self._fleet)
        self._write()

    def _write(self) -> None:
        text = json.dumps([*self._before, self._entry], indent=1) + "\n"
        with writing(self._folder.path):
            self._folder.check()
            write_atomically(self._folder.path / "machines.json", text.encode())

    def _entries(self) -> list[Any]:
        try:
            found = run_files.value(run_files.text(self._folder.path / "machines.json"))
        except (ValueError, CheckpointError):
            return []
        return found if isinstance(found, list) else []


def _alike(fleet: Fleet) -> list[dict[str, Any]]:
    """What the workers said they are, alike ones together with their number."""
    found: dict[str, dict[str, Any]] = {}
    for worker in fleet.probe().workers:
        said = {name: value for name, value in worker.items() if name not in ("name", "pid")}
        one = found.setdefault(json.dumps(said, sort_keys=True), {"number": 0, **said})
        one["number"] += 1
    return [*found.values()]
