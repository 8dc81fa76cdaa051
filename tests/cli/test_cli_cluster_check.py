"""`rlflame cluster-check`: output, exit codes, and signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading

import pytest
from commands import finished, process, rlflame
from flame_stub import FlameStub

from rlflame.fleet.flame.check import cluster_check
from rlflame.fleet.flame.check.cluster_check import ClusterCheck
from rlflame.fleet.flame.check.findings import CheckTimeouts, Finding

PATIENCE_S = 60


def find_renderer() -> Finding:
    """A result that replaces the test of renderers."""
    return Finding("graphics", "ok", "one works")


@pytest.fixture
def quick(monkeypatch):
    """No test of renderers, and the shortest time limits that the stub allows."""
    pace = CheckTimeouts(
        still_s=0.3, lease_s=0.6, first_answer_s=PATIENCE_S, all_answers_s=PATIENCE_S
    )

    def hurried(show, tell, graphics, **options):
        return ClusterCheck(show, tell, find_renderer, **options, timeouts=pace)

    monkeypatch.setattr(cluster_check, "ClusterCheck", hurried)


@pytest.fixture
def stub(monkeypatch):
    FlameStub.reset_client()
    with FlameStub(executors=1) as found:
        for name, value in found.environment().items():
            monkeypatch.setenv(name, value)
        yield found
    FlameStub.reset_client()


def eventually(condition):
    for _ in range(PATIENCE_S * 100):
        if found := condition():
            return found
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


def test_without_a_cluster_the_check_shows_how_to_start_one(quick):
    spoken = rlflame("cluster-check")
    assert spoken.code == 3
    assert "no Flame cluster is configured" in spoken.out
    assert "fix: docker compose -f compose/compose.yaml up -d\n" in spoken.out
    assert "fix: export FLAME_ENDPOINT=http://127.0.0.1:8080 FLAME_CACHE_ENDPOINT=" in spoken.out
    assert "ok       this machine" in spoken.out


def test_a_newcomer_s_program_gets_the_same_as_json(quick):
    spoken = rlflame("cluster-check", "--json")
    said = spoken.json()
    assert (spoken.code, said["exit_code"], said["verdict"]) == (3, 3, "unreachable")
    assert said["configured"] is False
    assert said["checks"][0]["check"] == "configuration"


def test_the_screen_line_by_line(monkeypatch):
    """The status comes first, then the checks, the notes and the next command."""
    findings = [
        Finding("configuration", "ok", "FLAME_ENDPOINT: there"),
        Finding("workers", "ok", "like this one", notes=("a: 2 executors",)),
        Finding("packages", "warning", "numpy absent", ("install it",)),
        Finding("executors", "failed", "1 of 2 stuck", ("stop it", "or start it"), ("e1 on a",)),
    ]

    class Played:
        def __init__(self, show, tell, graphics, **options):
            self.show = show

        def run(self):
            from rlflame.fleet.flame.check.findings import Diagnosis

            for found in findings:
                self.show(found)
            return Diagnosis(tuple(findings), is_configured=True, reachable=True)

    monkeypatch.setattr(cluster_check, "ClusterCheck", Played)
    monkeypatch.setenv("FLAME_ENDPOINT", "http://there:8080")
    spoken = rlflame("cluster-check")
    assert spoken.code == 1
    assert spoken.out == (
        "ok       configuration    FLAME_ENDPOINT: there\n"
        "ok       workers          like this one\n"
        "                          a: 2 executors\n"
        "warning  packages         numpy absent\n"
        "         fix: install it\n"
        "failed   executors        1 of 2 stuck\n"
        "                          e1 on a\n"
        "         fix: stop it\n"
        "         fix: or start it\n"
        "Degraded; failed: executors; warnings: packages.\n"
    )
    assert rlflame("cluster-check", "--json").json() == {
        "verdict": "degraded",
        "exit_code": 1,
        "configured": True,
        "checks": json.loads(json.dumps([found.as_dict() for found in findings])),
    }


def test_a_healthy_cluster_in_lines(stub, quick):
    spoken = rlflame("cluster-check", "--workers", "1")
    assert spoken.code == 0
    assert spoken.lines[-1].startswith("Healthy")
    checks = [line[9:24].strip() for line in spoken.lines if line[:2] == "ok"]
    asked = ["configuration", "session manager", "object cache", "template", "nodes", "capacity"]
    asked += ["probe", "workers", "packages", "tasks", "executors", "scheduling"]
    assert checks == [*asked, "sessions", "this machine", "graphics"]
    assert stub.applications() == []


def test_nobody_at_the_address(quick, monkeypatch):
    with socket.socket() as taken:  # and does not listen on the port
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("FLAME_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("FLAME_CACHE_ENDPOINT", f"grpc://127.0.0.1:{port}")
        FlameStub.reset_client()
        spoken = rlflame("cluster-check")
    assert spoken.code == 3
    assert "failed   session manager" in spoken.out
    assert spoken.lines[-1] == "Unreachable; failed: session manager, object cache."
    assert "Traceback" not in spoken.out + spoken.err


def test_how_many_to_ask_is_a_number_of_executors():
    assert rlflame("cluster-check", "--workers", "0").code == 2


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_ended_while_it_waits_it_leaves_nothing_and_goes(stub, number, code):
    stub.faults.no_executors = True
    running = process("cluster-check")
    try:
        eventually(lambda: stub.sessions())
        running.send_signal(number)
        spoken = finished(running, PATIENCE_S)
    finally:
        running.kill()
    assert spoken.code == code
    assert "Traceback" not in spoken.err
    assert "  hint: run the same command again" in spoken.err
    assert stub.applications() == []
    assert stub.objects() == {}
    assert [session.state for session in stub.sessions() if session.state == "Open"] == []


def test_what_a_killed_check_up_leaves_is_a_dead_run(stub, quick):
    stub.faults.no_executors = True
    running = process("cluster-check")
    eventually(lambda: stub.sessions())
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    (left,) = stub.applications()
    stub.faults.no_executors = False
    spoken = rlflame("cluster-check", "--clean", "--json")
    (cleaned,) = [one for one in spoken.json()["checks"] if one["check"] == "cleaning"]
    assert left in cleaned["facts"]["removed"][0]
    assert stub.applications() == []
    assert stub.objects() == {}


def test_a_cluster_is_looked_at_without_torch(stub, tmp_path):
    """The command does not import torch, and ends early without a cache."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was asked for')\n")
    stub.stop_cache()
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    spoken = finished(process("cluster-check", environment={"PYTHONPATH": path}), PATIENCE_S)
    assert spoken.code == 3
    assert "torch" not in spoken.out + spoken.err
    assert spoken.lines[-1].startswith("Unreachable; failed: object cache")
    assert "ok       nodes" in spoken.out
    assert any(line[9:17] == "graphics" for line in spoken.lines)
