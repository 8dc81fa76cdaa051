"""The available memory of simulated machines."""

from __future__ import annotations

import os
import resource

import pytest

from rlflame.storage.available_memory import (
    PROCESS_BYTES,
    RESERVED_BYTES,
    measure_available_bytes,
    measure_usable_bytes,
)

GB = 1_000_000_000


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 64000000 kB\nMemFree: 1 kB\nMemAvailable: 31250000 kB\n"}
AVAILABLE = 32 * GB


def test_a_bare_machine_has_what_its_kernel_says(tmp_path):
    assert measure_available_bytes(machine(tmp_path, MEMINFO)) == AVAILABLE


def test_a_system_without_such_files_is_asked_itself(tmp_path):
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert measure_available_bytes(tmp_path) == pages


@pytest.mark.parametrize(
    ("group", "limit", "used", "cached", "expected"),
    [
        ("/", "4000000000", 1_000_000_000, 500_000_000, 3_500_000_000),
        ("/", "max", 1_000_000_000, 0, AVAILABLE),
        ("/", "1000", 2_000, 0, 0),
        # A group of the host that is not mounted here, so the container's own files count.
        ("/../../docker/abc", "4000000000", 0, 0, 4_000_000_000),
        ("/kubepods/pod1/abc", "4000000000", 0, 0, 4_000_000_000),
    ],
)
def test_a_container_has_what_its_limit_leaves(tmp_path, group, limit, used, cached, expected):
    files = {
        **MEMINFO,
        "proc/self/cgroup": f"0::{group}\n",
        "sys/fs/cgroup/memory.max": limit,
        "sys/fs/cgroup/memory.current": str(used),
        "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {cached}\nactive_file 9\n",
    }
    assert measure_available_bytes(machine(tmp_path, files)) == expected


def test_the_narrowest_of_nested_groups_counts(tmp_path):
    files = {**MEMINFO, "proc/self/cgroup": "0::/user.slice/shell.scope\n"}
    for folder, limit in (
        ("", 9 * GB),
        ("user.slice/", 2 * GB),
        ("user.slice/shell.scope/", "max"),
    ):
        files[f"sys/fs/cgroup/{folder}memory.max"] = str(limit)
        files[f"sys/fs/cgroup/{folder}memory.current"] = "0"
    assert measure_available_bytes(machine(tmp_path, files)) == 2 * GB


def test_groups_of_the_first_version_count_too(tmp_path):
    files = {
        **MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(3 * GB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GB),
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 100\n",
    }
    assert measure_available_bytes(machine(tmp_path, files)) == 2 * GB + 100


def test_a_limit_on_addresses_counts_too(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * GB, resource.RLIM_INFINITY))
    here = machine(tmp_path, {**MEMINFO, "proc/self/statm": "1000 7 7 7 0 7 0\n"})
    left = 3 * GB - 1000 * resource.getpagesize()
    assert measure_usable_bytes(here) == left - RESERVED_BYTES
    assert (
        measure_available_bytes(here) == AVAILABLE
    )  # which other processes share, and this limit not
    (tmp_path / "proc/self/statm").unlink()
    assert measure_usable_bytes(here) == AVAILABLE - PROCESS_BYTES
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000, resource.RLIM_INFINITY))
    assert measure_usable_bytes(machine(tmp_path, {**MEMINFO, "proc/self/statm": "1\n"})) == 0
