"""The restarts of a Flame worker's service, without a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from rlflame.fleet.flame import service_supervisor


def test_a_service_that_dies_again_and_again_is_started_anew_after_a_pause(monkeypatch):
    """After the first death, there is no pause."""
    done = []
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: done.append("pause"))
    monkeypatch.setattr(service_supervisor, "time", clock)
    monkeypatch.setattr(service_supervisor, "ATTEMPTS", 3)
    monkeypatch.setattr(os, "fork", lambda: done.append("start") or 1)
    monkeypatch.setattr(os, "waitpid", lambda pid, _: (pid, signal.SIGKILL))
    with pytest.raises(SystemExit):
        service_supervisor.watch("record")
    assert done == ["start", "start", "pause", "start", "pause"]


#: The manager, `uv run` and the supervisor wait for their children. The last process checks.
CHAIN = """
import os, sys, threading
from rlflame.fleet.flame import service_supervisor

for _ in range(3):
    if child := os.fork():
        os.waitpid(child, 0)
        sys.exit()

def list_ancestors():
    ancestors = find()
    print("checked", flush=True)
    return ancestors

find, service_supervisor.list_ancestors = service_supervisor.list_ancestors, list_ancestors
service_supervisor.CHECK_S = 0.02
service_supervisor.exit_without_manager(threading.Event())
print("still here", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the check reads /proc")
def test_a_service_without_a_session_ends_with_its_executor_manager():
    manager = subprocess.Popen([sys.executable, "-c", CHAIN], stdout=subprocess.PIPE)
    assert manager.stdout is not None
    assert manager.stdout.readline() == b"checked\n"
    manager.kill()
    # The output ends when all processes have ended.
    assert b"still here" not in manager.stdout.read()
    manager.wait()


def test_a_service_whose_executor_manager_lives_waits_for_its_session(monkeypatch):
    start_event, checks = threading.Event(), []

    def check() -> list[int]:
        checks.append(None)
        if len(checks) == 3:
            start_event.set()
        return [1, 2]

    monkeypatch.setattr(service_supervisor, "CHECK_S", 0.001)
    monkeypatch.setattr(service_supervisor, "list_ancestors", check)
    service_supervisor.exit_without_manager(start_event)
    assert len(checks) == 3
