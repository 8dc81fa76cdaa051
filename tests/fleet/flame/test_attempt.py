"""An attempt survives an absent session manager; these tests need no Flame."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from rlflame.errors import FleetError
from rlflame.fleet.flame import attempt


def test_pauses_between_calls_double_up_to_two_seconds(monkeypatch):
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=pauses.append)
    monkeypatch.setattr(attempt, "time", clock)
    monkeypatch.setattr(attempt.AttemptRunner, "_is_session_over", lambda self: False)
    unused: Any = None
    runtime: Any = SimpleNamespace(flame=SimpleNamespace(reconnect_s=60.0))
    board: Any = SimpleNamespace(closing=threading.Event())
    runner = attempt.AttemptRunner(unused, unused, unused, board, runtime)

    def call() -> str:
        if len(pauses) < 7:
            raise FleetError("The session manager is away.")
        return "back"

    assert runner._call_persistently(call) == "back"
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
