"""The record of the machine, and of the processor time of workers."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy
import pytest
from commands import TINY, rlflame

from rlflame import __version__
from rlflame.storage import metrics
from rlflame.storage.metrics import PhaseTimer, read_children_cpu_s

BURN = """
import sys, time
while time.process_time() < 0.3:
    pass
print(time.process_time(), flush=True)
sys.stdin.read()
"""


def test_what_children_spend_counts_while_they_live_and_after():
    before = read_children_cpu_s()
    if before is None:
        pytest.skip("this system does not tell")
    child = subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    spent = float(child.stdout.readline())
    living = read_children_cpu_s() - before
    # The system counts hundredths of a second, for user and system time.
    assert spent - 0.03 <= living <= spent + 0.1
    child.communicate()
    assert spent - 0.03 <= read_children_cpu_s() - before <= spent + 0.5


def test_a_lap_holds_what_workers_spent_in_it(monkeypatch):
    readings = iter([10.0, 12.5, 12.0, None])
    monkeypatch.setattr(metrics, "read_children_cpu_s", lambda: next(readings))
    times = PhaseTimer()
    assert times.finish_lap()["workers_cpu_s"] == 2.5
    assert times.finish_lap()["workers_cpu_s"] == 0.0  # a worker has just ended
    assert "workers_cpu_s" not in times.finish_lap()
    monkeypatch.setattr(metrics, "read_children_cpu_s", lambda: None)
    assert "workers_cpu_s" not in PhaseTimer().finish_lap()


def test_every_process_that_trained_is_noted(tmp_path):
    run = tmp_path / "run"
    words = ("--steps", "128", "--set", "horizon_steps=256", "--out", run)
    assert rlflame("train", *TINY, *words).code == 0
    assert rlflame("resume", run, "--steps", "256").code == 0
    first, second = json.loads((run / "machines.json").read_text())
    assert (first["steps"], second["steps"]) == (0, 128)
    assert first["rlflame"] == __version__
    assert (first["fleet"], first["capacity"]) == ("inline", 1)
    assert first["machine"]["packages"]["numpy"] == numpy.__version__
    assert first["machine"]["memory_bytes"] > 1 << 26
    lines = (run / "episodes.csv").read_text().splitlines()[1:]
    earlier = sum(int(line.split(",")[3]) <= 128 for line in lines)
    assert first["episodes"] == {"worker-1": earlier}
    assert second["episodes"] == {"worker-1": len(lines) - earlier}
    (worker,) = first["workers"]
    assert (worker["number"], worker["numpy"]) == (1, numpy.__version__)
    # Resuming a finished run trains nothing.
    assert rlflame("resume", run).code == 0
    assert len(json.loads((run / "machines.json").read_text())) == 2


def test_what_cannot_be_read_begins_anew(tmp_path):
    run = tmp_path / "run"
    words = ("--steps", "128", "--set", "horizon_steps=256", "--out", run)
    assert rlflame("train", *TINY, *words).code == 0
    (run / "machines.json").write_text("rubbish")
    assert rlflame("resume", run, "--steps", "256").code == 0
    assert [entry["steps"] for entry in json.loads((run / "machines.json").read_text())] == [128]


def test_the_episodes_of_each_worker_are_recorded(tmp_path):
    run = tmp_path / "run"
    words = ("--fleet", "local", "--workers", "2", "--steps", "512", "--out", run)
    assert rlflame("train", *TINY, *words).code == 0
    (entry,) = json.loads((run / "machines.json").read_text())
    assert entry["episodes"].keys() <= {"worker-1", "worker-2"}
    count = len((run / "episodes.csv").read_text().splitlines()) - 1
    assert sum(entry["episodes"].values()) == count > 0
