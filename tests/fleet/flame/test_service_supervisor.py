"""The restarts of a Flame worker's service, without a process."""

from __future__ import annotations

import os
import signal
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
