"""cluster-check with a Flame stub: the result of each failure, end to end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from flame_stub import FlameStub

from rlflame.config.runtime import RuntimeSettings
from rlflame.fleet.flame import bundle, object_cache
from rlflame.fleet.flame.bundle import make_request
from rlflame.fleet.flame.check.cluster_check import ClusterCheck
from rlflame.fleet.flame.check.findings import CheckTimeouts, Diagnosis, Finding
from rlflame.fleet.flame.client import FlameClient
from rlflame.rollout.machine import describe_host

PATIENCE_S = 30
#: The timeouts of a real check, but shorter.
QUICK = CheckTimeouts(
    still_s=0.3,
    binding_s=1.0,
    lease_s=0.6,
    first_answer_s=1.0,
    all_answers_s=PATIENCE_S,
    closing_s=0.3,
)
#: Timeouts for checks that wait for the start of a worker process.
PATIENT = CheckTimeouts(
    still_s=1.0, lease_s=0.6, first_answer_s=PATIENCE_S, all_answers_s=PATIENCE_S
)


def check_no_graphics() -> Finding:
    """A result that replaces the test of renderers."""
    return Finding("graphics", "ok", "not tried")


def eventually(condition):
    for _ in range(PATIENCE_S * 100):
        if found := condition():
            return found
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


@pytest.fixture
def meet(monkeypatch):
    """Selects a stub for this process, and removes the selection at the end."""

    def settle(stub: FlameStub) -> FlameStub:
        FlameStub.reset_client()
        for name, value in stub.environment().items():
            monkeypatch.setenv(name, value)
        return stub

    yield settle
    FlameStub.reset_client()


@pytest.fixture
def stub(meet) -> Iterator[FlameStub]:
    with FlameStub(executors=2) as found:
        yield meet(found)


def examine(pace: CheckTimeouts = QUICK, **options: Any) -> Diagnosis:
    return ClusterCheck(
        lambda found: None,
        lambda text: None,
        timeouts=pace,
        check_graphics=check_no_graphics,
        **options,
    ).run()


def finding(diagnosis: Diagnosis, check: str):
    (found,) = [found for found in diagnosis.findings if found.check == check]
    return found


def leaves_nothing(stub: FlameStub) -> bool:
    open_ones = [session for session in stub.sessions() if session.state == "Open"]
    return not stub.applications() and not stub.objects() and not open_ones


# A healthy cluster.


def test_a_healthy_cluster(stub, monkeypatch):
    wait, polls = FlameClient.wait_for_answer, []

    def recorded(client, session, task, timeout_s, poll_s):
        polls.append(poll_s)
        return wait(client, session, task, timeout_s, poll_s)

    monkeypatch.setattr(FlameClient, "wait_for_answer", recorded)
    diagnosis = examine(PATIENT)
    # The measured round trips do not include the pauses between snapshots.
    assert len(polls) > 20
    assert max(polls[-20:]) <= 0.001
    assert diagnosis.list_checks("failed") == []
    assert (diagnosis.verdict, diagnosis.exit_code) == ("healthy", 0)
    probe = finding(diagnosis, "probe").facts
    assert probe["executors"] == 2
    assert 0 < probe["cold_start_s"] < PATIENCE_S
    # The stub's workers run on this machine with this interpreter.
    assert {finding(diagnosis, check).status for check in ("workers", "packages")} == {"ok"}
    said = finding(diagnosis, "workers").facts["executors"]
    assert len({one["pid"] for one in said}) == 2
    assert {one["host"] for one in said} == {socket.gethostname()}
    assert finding(diagnosis, "tasks").facts["number"] == 20
    assert finding(diagnosis, "object cache").facts["round_trip_ms"] > 0
    assert leaves_nothing(stub)


def test_no_call_is_made_where_ctrl_c_is_heard(stub, monkeypatch):
    """An interrupt in the middle of a call could make the channel unusable."""
    threads = set()

    def noted(call):
        def noting(*given):
            threads.add(threading.current_thread())
            return call(*given)

        return noting

    for name in ("create_task", "get_task_status"):
        monkeypatch.setattr(FlameClient, name, noted(getattr(FlameClient, name)))
    assert examine(PATIENT).verdict == "healthy"
    assert threads
    assert threading.main_thread() not in threads


def test_workers_bound_how_many_are_asked(stub):
    diagnosis = examine(PATIENT, workers=1)
    assert finding(diagnosis, "probe").facts["executors"] == 1


def test_executors_that_have_other_versions_than_this_machine(stub, monkeypatch):
    here = describe_host()
    here["packages"]["mujoco"] = "0.1"
    monkeypatch.setattr("rlflame.fleet.flame.check.cluster_check.describe_host", lambda: here)
    diagnosis = examine(PATIENT)
    assert finding(diagnosis, "packages").status == "warning"
    assert "(here 0.1)" in finding(diagnosis, "packages").text
    assert diagnosis.exit_code == 0


def test_executors_that_use_another_cache(stub, monkeypatch):
    with FlameStub(executors=0) as other:
        elsewhere = other.environment()["FLAME_CACHE_ENDPOINT"]
        monkeypatch.setenv("FLAME_CACHE_ENDPOINT", elsewhere)
        diagnosis = examine(PATIENT, workers=1)
        assert diagnosis.exit_code == 1
        right = stub.environment()["FLAME_CACHE_ENDPOINT"]
        assert f"export FLAME_CACHE_ENDPOINT={right}" in finding(diagnosis, "probe").fixes[0]


# Unreachable services.


def test_a_session_manager_that_is_down(stub):
    stub.stop_session_manager()
    diagnosis = examine()
    assert (diagnosis.verdict, diagnosis.exit_code) == ("unreachable", 3)
    assert diagnosis.list_checks("failed") == ["session manager"]
    found = finding(diagnosis, "session manager")
    assert f"does not answer at {stub.environment()['FLAME_ENDPOINT']} " in found.text
    assert "up -d" in found.fixes[0]
    assert finding(diagnosis, "object cache").status == "ok"


def test_an_object_cache_that_is_down(stub):
    stub.stop_cache()
    diagnosis = examine(clean=True)
    assert (diagnosis.verdict, diagnosis.exit_code) == ("unreachable", 3)
    assert diagnosis.list_checks("failed") == ["object cache", "cleaning"]
    assert "up -d" in finding(diagnosis, "object cache").fixes[0]
    assert finding(diagnosis, "nodes").status == "ok"
    assert finding(diagnosis, "probe").status == "warning"


@pytest.mark.parametrize("which", ["session manager", "object cache"])
def test_a_port_where_something_else_listens(stub, monkeypatch, which):
    variable = {"session manager": "FLAME_ENDPOINT", "object cache": "FLAME_CACHE_ENDPOINT"}[which]
    scheme = {"session manager": "http", "object cache": "grpc"}[which]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ended = threading.Event()
        answering = threading.Thread(target=_rude, args=(listener, ended))
        answering.start()
        monkeypatch.setenv(variable, f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")
        FlameStub.reset_client()
        monkeypatch.setattr("rlflame.fleet.flame.client._CONNECT_S", 0.5)
        try:
            diagnosis = examine()
        finally:
            ended.set()
            answering.join()
    assert diagnosis.exit_code == 3
    assert diagnosis.list_checks("failed") == [which]
    assert "try " in finding(diagnosis, which).fixes[0]


def _rude(listener: socket.socket, ended: threading.Event) -> None:
    """Ends each call with an error that is not gRPC's own."""
    listener.settimeout(0.05)
    while not ended.is_set():
        try:
            caller, _ = listener.accept()
        except TimeoutError:
            continue
        with caller:
            caller.sendall(b"220 mail.example ESMTP\r\n")


def test_a_cluster_that_goes_away_in_between(stub):
    def pull(found):
        if found.check == "template":
            stub.stop_session_manager()

    diagnosis = ClusterCheck(
        pull, lambda text: None, timeouts=QUICK, check_graphics=check_no_graphics
    ).run()
    assert diagnosis.exit_code == 3
    assert diagnosis.list_checks("failed") == ["nodes"]


# Failures, each with its own reason and fix.

#: Failures that appear only after a worker process has started.
SLOW_FAULTS = {"ghost_node", "bind_failure", "reference_endpoint"}


@pytest.mark.parametrize(
    ("faults", "ill", "check", "fix"),
    [
        ({"flmrun_missing": True}, ["template"], "template", "restart the session manager"),
        ({"ghost_node": "old"}, ["nodes"], "nodes", "executor manager of old under"),
        (
            {"reference_endpoint": "grpc://127.0.0.1:1"},
            ["probe"],
            "object cache",
            "network_interface",
        ),
        (
            {"cache_missing": True, "cache_missing_prefix": "rlflame-check-"},
            ["object cache"],
            "object cache",
            "cache.storage",
        ),
        (
            {"no_executors": True},
            ["probe", "scheduling"],
            "scheduling",
            "remove cluster.policies",
        ),
        ({"stuck_void": True}, ["probe", "executors"], "executors", "on node-1, wait 40 s"),
        ({"cold_start_s": 60.0}, ["probe", "executors"], "executors", "on node-1, wait 40 s"),
        ({"bind_failure": "No room in tmp"}, ["probe"], "probe", "FLAME_HOME/logs"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_illness_and_its_fix(stub, faults, ill, check, fix):
    for name, value in faults.items():
        setattr(stub.faults, name, value)
    diagnosis = examine(PATIENT if SLOW_FAULTS & faults.keys() else QUICK)
    assert diagnosis.list_checks("failed") == ill
    assert (diagnosis.verdict, diagnosis.exit_code) == ("degraded", 1)
    assert fix in " ".join(finding(diagnosis, check).fixes)
    assert faults.get("bind_failure", "") in finding(diagnosis, check).text
    assert leaves_nothing(stub)


def test_without_gang_no_executor_comes(meet):
    with FlameStub(executors=1, policies=("priority", "drf")) as stub:
        meet(stub)
        diagnosis = examine()
    assert diagnosis.list_checks("failed") == ["probe", "scheduling"]
    assert "gang" in finding(diagnosis, "scheduling").fixes[0]


def test_executors_that_fail_their_tasks(stub):
    stub.faults.fail_tasks, stub.faults.fail_text = True, "disk is full"
    diagnosis = examine(PATIENT)
    assert diagnosis.list_checks("failed") == ["probe"]
    assert "disk is full" in finding(diagnosis, "probe").text
    assert leaves_nothing(stub)


def test_nodes_that_come_and_go(meet):
    with FlameStub(executors=2, nodes=2) as stub:
        meet(stub)
        stub.faults.no_executors = True
        stub.lose_node("node-2", noticed=False)
        assert finding(examine(), "nodes").status == "failed"
        stub.notice_loss("node-2")
        found = finding(examine(), "nodes")
        assert (found.status, "node-2" in found.fixes[0]) == ("failed", True)
        stub.return_node("node-2")
        assert finding(examine(), "nodes").status == "ok"


def test_an_executor_that_never_lets_go_of_a_dead_worker(stub):
    cluster = FlameClient().open()
    session = opened(cluster, "others", most=1)
    cluster.create_task(session, make_request("ping"))
    (bound,) = eventually(lambda: [e for e in stub.executors() if e.state == "Bound"])
    stub.faults.black_hole = True
    stub.kill_executor(bound.id)
    task = cluster.create_task(session, make_request("ping"))
    eventually(lambda: cluster.get_task_status(session, task).state == 3)
    cluster.call("close_session", session.id)
    eventually(lambda: [e for e in stub.executors() if e.state == "Unbinding"])
    found = finding(examine(), "executors")
    cluster.close()
    assert found.status == "failed"
    assert bound.id in [one["executor"] for one in found.facts["stuck"]]
    assert f"{bound.id[:8]} on node-1: Unbinding" in found.notes[0]
    assert "executor manager on node-1" in found.fixes[0]


def test_a_full_cluster_is_not_ill(stub):
    cluster = FlameClient().open()
    session = opened(cluster, "others", most=2)
    for _ in range(2):
        cluster.create_task(session, make_request("greet", 3600.0))
    eventually(lambda: [task.state for task in stub.tasks(session.id)] == ["Running"] * 2)
    diagnosis = examine()
    cluster.close()
    assert diagnosis.exit_code == 0
    assert "others-s (2)" in finding(diagnosis, "capacity").text
    assert "capacity" in finding(diagnosis, "probe").fixes[0]
    assert "others-s" in " ".join(finding(diagnosis, "sessions").notes)
    assert stub.applications() == ["others"]


def opened(cluster: FlameClient, application: str, most: int) -> Any:
    """An open session of an application with rlflame's loader."""
    context = bundle.make_context(bundle.make_archive(), {})
    place = object_cache.put_value(f"{application}/shared", context)
    options = RuntimeSettings(workers=most, flame={"delay_release_s": 5})
    cluster.register_application(application, options)
    return cluster.open_session(f"{application}-s", application, place, options)


# Remains of dead runs.

DRIVER = """
import sys, time
from rlflame.fleet.flame import object_cache
from rlflame.config.runtime import RuntimeSettings
from rlflame.fleet.flame.client import FlameClient
object_cache.BEAT_INTERVAL_S = 0.05
cluster = FlameClient().open()
options = RuntimeSettings(workers=1, flame={"delay_release_s": 5})
for name in sys.argv[2:]:
    if name == sys.argv[2]:
        lease = object_cache.Lease(name)
    place = object_cache.put(f"{name}/shared", b"weights")
    cluster.register_application(name, options)
    cluster.open_session(f"{name}-s", name, place, options)
print("up", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def driver(stub):
    """A process with an open run and a lease, like `rlflame`, which a test can kill."""
    started = []

    def start(*names: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, "rlflame", *names],
            stdout=subprocess.PIPE,
            env={**os.environ, **stub.environment()},
        )
        started.append(process)
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_cleaning_after_a_kill_and_around_the_living(stub, driver, monkeypatch):
    """One run was killed, one is alive here, and one elsewhere, as its lease shows."""
    stub.faults.no_executors = True
    dead = driver("rlflame-dead", "rlflame-dead-i")
    driver("rlflame-living")
    os.kill(dead.pid, signal.SIGKILL)
    dead.wait()
    cluster = FlameClient().open()
    monkeypatch.setattr(object_cache, "BEAT_INTERVAL_S", 0.05)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "far-away")
        far = object_cache.Lease("rlflame-far")
        opened(cluster, "rlflame-far", most=1)
        opened(cluster, "others", most=1)
        eventually(lambda: far._beat > 1)

    looked = finding(examine(), "sessions")
    assert looked.status == "warning"
    assert looked.fixes == ("rlflame cluster-check --clean",)
    states = {run["name"]: run["state"] for run in looked.facts["runs"]}
    assert states["rlflame-dead"] == "dead"
    assert states["rlflame-living"] == states["rlflame-far"] == "alive"
    assert len(stub.applications()) == 5  # without --clean, nothing is removed

    diagnosis = examine(clean=True)
    cleaned = finding(diagnosis, "cleaning")
    assert cleaned.status == "ok"
    assert [text.split(";")[0] for text in cleaned.facts["removed"]] == ["removed: rlflame-dead"]
    open_ones = {session.id for session in stub.sessions() if session.state == "Open"}
    assert open_ones == {"rlflame-living-s", "rlflame-far-s", "others-s"}
    assert sorted(stub.applications()) == ["others", "rlflame-far", "rlflame-living"]
    assert not [key for key in stub.objects() if key.startswith("rlflame-dead")]
    assert [key for key in stub.objects() if key.startswith("rlflame-living/")]
    assert finding(diagnosis, "sessions").status == "ok"

    far.close()
    cluster.close()


def test_a_dead_run_whose_session_cannot_be_closed(stub, driver):
    stub.faults.no_executors = True
    dead = driver("rlflame-dead")
    dead.kill()
    dead.wait()
    stub.faults.close_refused = True
    found = finding(examine(clean=True), "cleaning")
    assert found.status == "failed"
    assert "running tasks" in " ".join(found.notes)
    assert "--clean" in found.fixes[0]
    assert "rlflame-dead" in stub.applications()
    stub.faults.close_refused = False
    again = finding(examine(clean=True), "cleaning")
    assert any("rlflame-dead" in text for text in again.facts["removed"])
    assert "rlflame-dead" not in stub.applications()
