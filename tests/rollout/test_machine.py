"""The usable cores of a machine, and the facts on which its last bits depend."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlflame.rollout import machine


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "nonsense\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
    ],
    ids=str,
)
def test_a_container_s_share_of_the_processors_is_read_in_either_spelling(
    files: dict[str, str], share: float, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine._read_quota(tmp_path) == share


@pytest.mark.parametrize(("share", "cores"), [(math.inf, 6), (2.5, 3), (0.1, 1), (64.0, 6)])
def test_cores_are_those_of_this_process_and_at_least_one(
    share: float, cores: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(machine, "_read_quota", lambda root: share)
    assert machine.count_usable_cores() == cores
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert machine.count_usable_cores() == cores


def test_the_fingerprint_names_what_bits_depend_on() -> None:
    assert machine.read_fingerprint().keys() == {"core", "simd", "system", "libc", "numpy"}
    assert all(machine.read_fingerprint().values())


def test_the_pythons_of_an_executor_are_those_that_have_flamepy(tmp_path, monkeypatch):
    for name, package in (("3.9", "flamepy"), ("3.10", "flamepy"), ("3.12", "numpy")):
        (tmp_path / f"lib/python{name}/site-packages/{package}").mkdir(parents=True)
    (tmp_path / "lib/python3.x/site-packages/flamepy").mkdir(parents=True)
    origin = tmp_path / "lib/python3.10/site-packages/flamepy/__init__.py"
    monkeypatch.setattr(machine, "find_spec", lambda name: SimpleNamespace(origin=str(origin)))
    own = f"3.{sys.version_info.minor}"
    versions = machine.list_flame_pythons()
    assert versions == [*(name for name in ("3.9", "3.10") if name != own), own]
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert machine.list_flame_pythons() == [own]
