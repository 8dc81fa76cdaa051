"""The findings of cluster-check for simulated snapshots, leases and answers.

Each check fails for one reason and names one fix. The clock is a fake.
"""

from __future__ import annotations

import io
import pickletools
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlflame.errors import FleetError
from rlflame.fleet.flame import bundle, client, object_cache
from rlflame.fleet.flame.check import cluster_check, cluster_snapshot, executor_probe, stale_runs
from rlflame.fleet.flame.check.cluster_snapshot import (
    GIB,
    Application,
    ClusterSession,
    ClusterSnapshot,
    Executor,
    Node,
)
from rlflame.fleet.flame.check.executor_probe import ProbeResult
from rlflame.fleet.flame.check.findings import CheckTimeouts, Diagnosis, Finding, shorten_error
from rlflame.fleet.flame.check.stale_runs import (
    RunScan,
    check_process,
    check_sessions,
    find_runs,
    remove_dead_runs,
)
from rlflame.fleet.flame.timed_call import format_error
from rlflame.rendering.gl_backend import BACKENDS, check_graphics, find_install_command
from rlflame.rollout import wire


class Time:
    """A fake of the module `time` whose clock advances when a function sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        #: Called after each sleep.
        self.meanwhile = lambda now: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile(self.now)


@pytest.fixture
def time(monkeypatch) -> Time:
    clock = Time()
    monkeypatch.setattr(stale_runs, "time", clock)
    monkeypatch.setattr(client, "time", clock)
    return clock


NODE = Node("node-1", "Ready", 4, 16 * GIB)
PACE = CheckTimeouts()


def executor(state: str = "Bound", session: str = "s", node: str = "node-1", id: str = "e1"):
    return Executor(id, node, state, session, 1, GIB)


def look(
    at_s: float, *executors: Executor, sessions=(), nodes=(NODE,), applications=()
) -> ClusterSnapshot:
    return ClusterSnapshot(at_s, tuple(nodes), executors, tuple(sessions), tuple(applications))


# The whole.


def test_a_warning_leaves_a_cluster_healthy_and_a_failure_does_not():
    fine, odd, bad = (
        Finding("a", "ok", "x"),
        Finding("b", "warning", "x", ("do",)),
        Finding("c", "failed", "x", ("do",)),
    )
    for findings, reachable, verdict, code in (
        ((fine,), True, "healthy", 0),
        ((fine, odd), True, "healthy", 0),
        ((fine, odd, bad), True, "degraded", 1),
        ((fine,), False, "unreachable", 3),
        ((bad,), False, "unreachable", 3),
    ):
        diagnosis = Diagnosis(findings, is_configured=True, reachable=reachable)
        assert (diagnosis.verdict, diagnosis.exit_code) == (verdict, code)


def test_what_libraries_say_is_made_short():
    said = "Flight returned unavailable, with message: refused. gRPC client debug context: {...} x"
    short = format_error(RuntimeError(said))
    assert short == "Flight returned unavailable, with message: refused"
    listing = RuntimeError("failed to list\n  sessions:  (code: 3)")
    assert format_error(listing) == "failed to list sessions:"
    assert len(shorten_error("word " * 1000)) < 300


# Nodes and capacity.


@pytest.mark.parametrize(
    ("states", "status", "words", "fix"),
    [
        (["Ready", "Ready"], "ok", "2 of 2 ready", ""),
        ([], "failed", "no executor manager", "up -d"),
        (["Ready", "NotReady"], "failed", "1 of 2 ready; not ready: n1", "n1 under the same"),
        (["Unknown", "Ready"], "failed", "1 of 2 ready; not ready: n0", "of n0 under"),
        (["Unknown", "NotReady"], "failed", "0 of 2 ready; not ready: n0, n1", "of n0, n1 under"),
    ],
)
def test_nodes_that_are_away(states, status, words, fix):
    nodes = [Node(f"n{i}", state, 2, 4 * GIB) for i, state in enumerate(states)]
    found = cluster_snapshot.check_nodes(look(0.0, nodes=nodes))
    assert (found.check, found.status) == ("nodes", status)
    assert words in found.text
    assert fix in " ".join(found.fixes)
    assert bool(found.fixes) == (status != "ok")


def test_room_is_what_executors_leave_in_processors_and_in_memory():
    thin = Node("thin", "Ready", 8, 2 * GIB)
    away = Node("away", "NotReady", 64, 64 * GIB)
    there = [executor(id="a"), executor(id="b"), Executor("c", "thin", "Bound", "s", 1, GIB)]
    seen = look(0.0, *there, nodes=[NODE, thin, away])
    assert seen.room == 2 + 1  # processors limit the first node, memory the second
    assert cluster_snapshot.check_capacity(seen).status == "ok"


def test_a_full_cluster_names_who_holds_it():
    held = [executor(session="mine", id=str(i)) for i in range(3)]
    found = cluster_snapshot.check_capacity(look(0.0, *held, executor(session="yours", id="y")))
    assert found.status == "warning"
    assert "mine (3), yours (1)" in found.text
    assert "--clean" in found.fixes[0]


# Stuck executors.

BUSY = ClusterSession("s", "app", pending=2, running=1, succeeded=5)
OPEN = ClusterSession("s", "app")


@pytest.mark.parametrize(
    ("state", "before", "after", "apart_s", "certain", "why"),
    [
        ("Void", None, None, 6.0, True, ""),
        ("Unbinding", OPEN, OPEN, 6.0, True, ""),
        ("Releasing", None, None, 6.0, True, ""),
        ("Void", None, None, 5.0, None, ""),
        ("Idle", None, None, 60.0, None, ""),
        ("Binding", OPEN, OPEN, 29.0, None, ""),
        ("Binding", OPEN, OPEN, 30.0, True, "its worker does not start"),
        ("Binding", None, None, 6.0, True, "its session is closed"),
        ("Bound", None, None, 6.0, True, "its session is closed"),
        ("Bound", OPEN, None, 6.0, None, ""),  # closed a moment ago
        ("Bound", OPEN, OPEN, 60.0, None, ""),  # warm and waiting for work
        ("Bound", BUSY, replace(BUSY, succeeded=6), 60.0, None, ""),
        ("Bound", BUSY, BUSY, 6.0, False, "its session's tasks make no progress"),
        ("Bound", BUSY, replace(BUSY, failure_count=40), 6.0, True, "40 tasks failed"),
        ("Bound", BUSY, replace(BUSY, failure_count=40, succeeded=6), 6.0, None, ""),
        (
            "Bound",
            *2 * [replace(BUSY, running=0)],
            6.0,
            True,
            "its session's tasks make no progress",
        ),
    ],
)
def test_an_executor_that_stands_still(state, before, after, apart_s, certain, why):
    looks = [
        look(0.0, executor(state), sessions=filter(None, [before])),
        look(apart_s, executor(state), sessions=filter(None, [after])),
    ]
    found, _ = cluster_snapshot.find_stuck(looks, PACE)
    assert [each["certain"] for each in found] == ([] if certain is None else [certain])
    assert all(why in each["reason"] for each in found)
    status = {None: "ok", True: "failed", False: "warning"}[certain]
    said = cluster_snapshot.check_executors(looks, PACE)
    assert said.status == status
    if certain is not None:
        assert "stop the executor manager on node-1, wait 40 s" in said.fixes[-1]
        assert "e1" in said.notes[0]
        assert "node-1" in said.notes[0]
        # The log of a worker that does not start is the only place with the cause.
        assert ("e1/e1.err" in said.notes[-1]) == (state == "Binding")


def test_an_installation_may_take_longer_than_a_start():
    application = Application("app", installs=True)
    looks = [
        look(t, executor("Binding"), sessions=[OPEN], applications=[application])
        for t in (0.0, 31.0)
    ]
    assert cluster_snapshot.check_executors(looks, PACE).status == "warning"


def test_an_executor_that_moved_in_between_is_not_stuck():
    states = ["Unbinding", "Idle", "Unbinding"]
    looks = [look(4.0 * i, executor(state)) for i, state in enumerate(states)]
    assert cluster_snapshot.find_stuck(looks, PACE)[0] == []
    again = [look(4.0 * i, executor("Unbinding", session=f"s{i}")) for i in range(3)]
    assert cluster_snapshot.find_stuck(again, PACE)[0] == []
    gone = [look(0.0, executor("Void")), look(4.0), look(8.0, executor("Void"))]
    assert cluster_snapshot.find_stuck(gone, PACE)[0] == []


@pytest.mark.parametrize(
    ("state", "sessions", "passed_s", "wanted"),
    [
        ("Binding", [OPEN], 0.0, True),
        ("Binding", [OPEN], 29.0, True),
        ("Binding", [OPEN], 31.0, False),
        ("Binding", [], 0.0, True),
        ("Binding", [], 7.0, False),
        ("Unbinding", [], 5.0, True),
        ("Unbinding", [], 7.0, False),
        ("Bound", [OPEN], 0.0, False),
        ("Bound", [BUSY], 5.0, True),
        ("Bound", [BUSY], 7.0, False),
        ("Idle", [], 0.0, False),
    ],
)
def test_a_later_look_is_wanted_only_while_it_can_tell_more(state, sessions, passed_s, wanted):
    looks = [look(t, executor(state), sessions=sessions) for t in (0.0, passed_s)]
    assert cluster_snapshot.find_stuck(looks, PACE)[1] == wanted


def test_an_executor_is_given_time_from_when_its_session_was_closed():
    binding = executor("Binding")
    looks = [look(0.0, binding, sessions=[OPEN]), look(9.0, binding), look(14.0, binding)]
    assert cluster_snapshot.find_stuck(looks, PACE)[0] == []
    ((found,), _) = cluster_snapshot.find_stuck([*looks, look(15.0, binding)], PACE)
    assert (found["for_s"], found["reason"]) == (6.0, "its session is closed")


def test_the_fix_for_a_node_of_compose_is_a_command():
    assert "compose.yaml restart executor-2" in cluster_snapshot.format_remedy("executor-2")
    assert "compose" not in cluster_snapshot.format_remedy("gpu-7")


# Waiting tasks.

WAITS = ClusterSession("s", "app", pending=3)


def test_tasks_that_wait_while_processors_are_free_are_the_policies_fault():
    looks = [look(t, sessions=[WAITS]) for t in (0.0, 7.0)]
    found = cluster_snapshot.check_scheduling(looks, PACE)
    assert found.status == "failed"
    assert "gang" in found.fixes[0]
    assert "s" in found.text


@pytest.mark.parametrize(
    "looks",
    [
        [look(t, sessions=[WAITS]) for t in (0.0, 5.0)],
        [look(0.0), look(7.0, sessions=[WAITS])],
        [look(t, executor("Binding"), sessions=[WAITS]) for t in (0.0, 7.0)],
        [look(t, sessions=[replace(WAITS, running=1)]) for t in (0.0, 7.0)],
        [look(t, sessions=[WAITS], nodes=[replace(NODE, state="NotReady")]) for t in (0.0, 7.0)],
        [look(t, sessions=[WAITS], nodes=[replace(NODE, memory_bytes=1)]) for t in (0.0, 7.0)],
        [look(t) for t in (0.0, 7.0)],
    ],
    ids=["too soon", "just came", "an executor", "it runs", "away", "no memory", "nothing waits"],
)
def test_other_reasons_to_wait_are_not_the_policies_fault(looks):
    assert cluster_snapshot.check_scheduling(looks, PACE).status == "ok"


def test_a_session_that_flame_has_given_up_says_why():
    paused = replace(WAITS, is_paused=True, problem="No module named 'mine'")
    found = cluster_snapshot.check_scheduling(
        [look(t, sessions=[paused]) for t in (0.0, 7.0)], PACE
    )
    assert found.status == "warning"
    assert "No module named 'mine'" in found.text


# Live and dead runs.


class Book:
    """Fake leases in the cache."""

    def __init__(self) -> None:
        self.leases = {}
        self.ended: list[str] = []

    def read(self, key):
        found = self.leases.get(key.partition("/")[0])
        if isinstance(found, Exception):
            raise found
        return found and dict(found)

    def write(self, key, found):
        assert found["closing"]
        self.ended.append(key.partition("/")[0])

    def fill(self, **leases) -> None:
        self.leases = {f"rlflame-{name}": found for name, found in leases.items()}


@pytest.fixture
def book(monkeypatch) -> Book:
    found = Book()
    monkeypatch.setattr(object_cache, "read_lease", found.read)
    monkeypatch.setattr(object_cache, "write_lease", found.write)
    return found


def lease(beat: int, host: str = "far", pid: int = 7):
    return {"beat": beat, "closing": False, "host": host, "pid": pid}


def cluster_with(*names: str, sessions=()) -> ClusterSnapshot:
    return look(0.0, applications=[Application(n, "rlflame") for n in names], sessions=sessions)


def settled(seen: ClusterSnapshot, later: ClusterSnapshot | None = None):
    return RunScan(seen, PACE).settle(lambda: later or seen, lambda text: None)


def test_a_lease_that_moves_is_life_and_one_that_stands_is_death(time, book):
    book.fill(old=lease(3), young=lease(5))
    time.meanwhile = lambda now: book.leases["rlflame-young"].update(beat=5 + int(now - 1000) // 5)
    dead, living = settled(cluster_with("rlflame-old", "rlflame-young"))
    assert (dead.name, dead.state) == ("rlflame-old", "dead")
    assert (living.name, living.state) == ("rlflame-young", "alive")
    assert 95.0 < time.now - 1000 < 110.0  # workers give up after 90 s without a heartbeat
    assert "process 7 on far" in dead.reason


def test_a_run_of_this_machine_whose_process_is_gone_is_given_less_time(time, book, monkeypatch):
    monkeypatch.setattr(
        stale_runs, "check_process", lambda lease: {"here": "gone"}.get(lease["host"], "")
    )
    book.fill(a=lease(1), b=lease(1, host="here", pid=12))
    far, gone = settled(cluster_with("rlflame-a", "rlflame-b"))
    assert "not renewed for 100 s" in far.reason
    assert "not renewed for 11 s" in gone.reason


def test_a_beat_outweighs_what_is_known_of_the_process(time, book, monkeypatch):
    """Process ids mean nothing if drivers in containers share this host name."""
    monkeypatch.setattr(stale_runs, "check_process", lambda lease: "gone")
    book.fill(a=lease(1, host="here", pid=12))
    time.meanwhile = lambda now: book.leases["rlflame-a"].update(beat=1 + int(now - 1000) // 5)
    (fate,) = settled(cluster_with("rlflame-a"))
    assert fate.state == "alive"


def test_a_process_is_gone_where_this_machine_has_none_of_its_number():
    here = socket.gethostname()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert check_process(lease(1, here, other.pid)) == "doubtful"
        other.stdin.close()
        other.wait()
    assert check_process(lease(1, here, other.pid)) == "gone"
    assert check_process(lease(1, "far", other.pid)) == "doubtful"


@pytest.mark.parametrize(
    ("now", "state"),
    [
        (ClusterSession("s", "rlflame-a"), "dead"),
        (ClusterSession("s", "rlflame-a", succeeded=1), "unknown"),
        (ClusterSession("s", "rlflame-a", running=1), "unknown"),
    ],
)
def test_without_a_lease_a_run_is_dead_when_nothing_of_it_moves(now, state, time, book):
    before = replace(now, succeeded=0)
    seen, later = (cluster_with("rlflame-a", sessions=[session]) for session in (before, now))
    (fate,) = settled(seen, later)
    assert fate.state == state


def test_a_lease_that_appears_is_life_and_one_that_cannot_be_read_is_doubt(time, book):
    book.fill(b=FleetError("The cluster did not answer."))
    time.meanwhile = lambda now: book.leases.update({"rlflame-a": lease(1)})
    born, doubtful = settled(cluster_with("rlflame-a", "rlflame-b"))
    assert (born.state, doubtful.state) == ("alive", "unknown")


def test_a_run_that_ends_while_it_is_looked_at_is_not_dead(time, book):
    book.fill(a=lease(1))
    (fate,) = settled(cluster_with("rlflame-a"), cluster_with())
    assert fate.state == "alive"


def test_an_installing_run_s_two_applications_are_one_run_and_strangers_are_none():
    own = [ClusterSession("x", "rlflame-a"), ClusterSession("y", "rlflame-a-i")]
    strange = ClusterSession("z", "rlflame-other")
    seen = look(
        0.0,
        sessions=[*own, strange],
        applications=[
            Application("rlflame-a", "rlflame"),
            Application("rlflame-a-i", "rlflame"),
            Application("rlflame-other", "Runner application: rlflame-other"),
            Application("flmrun"),
        ],
    )
    (run,) = find_runs(seen)
    assert (run.name, run.sessions) == ("rlflame-a", own)
    assert check_sessions([], seen).facts["others"] == [strange.id]


def test_dead_runs_are_listed_with_the_command_that_removes_them():
    seen = cluster_with("rlflame-a", "rlflame-b")
    dead, living = find_runs(seen)
    dead.settle("dead", "")
    living.settle("alive", "")
    found = check_sessions([dead, living], seen)
    assert (found.status, found.fixes) == ("warning", ("rlflame cluster-check --clean",))
    assert check_sessions([living], seen).status == "ok"


@pytest.mark.parametrize("content", [b"nonsense", wire.encode({"some": "thing"}), wire.encode(7)])
def test_a_lease_of_another_kind_is_an_error_and_no_life(monkeypatch, content):
    monkeypatch.setattr(object_cache, "get", lambda *address: memoryview(content))
    with pytest.raises(FleetError, match="object is not a valid lease"):
        object_cache.read_lease("rlflame-a/lease/lease")


# Deleting.


class Shelf:
    """Records deletions. Sessions in `busy` refuse to close this number of times."""

    def __init__(self, seen: ClusterSnapshot, busy: dict[str, int] | None = None) -> None:
        self.open = {session.id: session.application for session in seen.sessions}
        self.names = {application.name for application in seen.applications}
        self.busy = busy or {}
        self.deleted: list[str] = []
        self.cache_is_away = False
        #: The sessions and applications that existed when objects were first deleted.
        self.still_there: set[str] | None = None

    def call(self, method, *arguments):
        return getattr(self, method)(*arguments)

    def close_session(self, name):
        if self.busy.get(name, 0) > 0:
            self.busy[name] -= 1
            raise FleetError("Cannot close session with running tasks.")
        if name not in self.open:
            raise FleetError("no such session")
        del self.open[name]

    def list_sessions(self):
        return [
            SimpleNamespace(id=name, state=0, application=application)
            for name, application in self.open.items()
        ]

    def list_applications(self):
        return [SimpleNamespace(name=name) for name in self.names]

    close_sessions = client.FlameClient.close_sessions

    def unregister_application(self, name):
        if name not in self.names:
            raise FleetError("no such application")
        self.names.remove(name)

    def delete_objects(self, prefix):
        if self.cache_is_away:
            raise FleetError("The cluster did not answer within 20 s (delete objects).")
        if self.still_there is None:
            self.still_there = {*self.open, *self.names}
        self.deleted.append(prefix)


@pytest.fixture
def shelve(monkeypatch, time, book):
    """Make a cluster with runs, each with a lease, and the record of its deletions."""

    def make(*names: str, **busy: int):
        sessions = [ClusterSession(f"{name}-s", f"rlflame-{name}") for name in names]
        seen = cluster_with(*(f"rlflame-{name}" for name in names), sessions=sessions)
        shelf = Shelf(seen, {f"{name}-s": times for name, times in busy.items()})
        monkeypatch.setattr(object_cache, "delete", shelf.delete_objects)
        book.fill(**{name: lease(1) for name in names})
        return seen, shelf

    return make


def runs_of(seen: ClusterSnapshot, *states: str, beat: int | None = 1):
    runs = find_runs(seen)
    for run, state in zip(runs, states, strict=True):
        run.settle(state, "why")
        run.lease = lease(beat) if beat else None
    return runs


def test_cleaning_removes_the_dead_and_touches_nobody_else(shelve, book):
    seen, shelf = shelve("a", "b", "c")
    found = remove_dead_runs(shelf, runs_of(seen, "dead", "alive", "unknown"), 15.0)
    assert found.status == "ok"
    assert set(shelf.open) == {"b-s", "c-s"}
    assert shelf.names == {"rlflame-b", "rlflame-c"}
    assert shelf.deleted == ["rlflame-a/*", "rlflame-a-i/*"]
    assert book.ended == ["rlflame-a"]
    said = " ".join(found.notes)
    assert "removed: rlflame-a" in said
    assert "left alone: rlflame-b, why" in said
    assert "left alone: rlflame-c, why" in said


@pytest.mark.parametrize(("beat", "now"), [(1, lease(2)), (None, lease(1))])
def test_a_run_that_moves_at_the_last_moment_is_left_alone(beat, now, shelve, book):
    seen, shelf = shelve("a")
    book.fill(a=now)
    found = remove_dead_runs(shelf, runs_of(seen, "dead", beat=beat), 15.0)
    assert set(shelf.open) == {"a-s"}
    assert shelf.names == {"rlflame-a"}
    assert shelf.deleted == []
    assert ", its lease is being renewed again" in " ".join(found.notes)


def test_sessions_whose_tasks_still_run_are_asked_again(shelve):
    seen, shelf = shelve("a", a=5)
    found = remove_dead_runs(shelf, runs_of(seen, "dead"), 15.0)
    assert found.status == "ok"
    assert shelf.names == set()


def test_a_session_that_never_closes_is_given_up_and_named(shelve, time):
    seen, shelf = shelve("a", "b", a=10**6)
    found = remove_dead_runs(shelf, runs_of(seen, "dead", "dead"), 15.0)
    assert found.status == "failed"
    assert shelf.names == {"rlflame-a"}
    assert shelf.deleted == ["rlflame-b/*", "rlflame-b-i/*"]
    assert time.now - 1000 < 60.0
    assert "not removed: rlflame-a, Cannot close" in " ".join(found.notes)
    assert "--clean" in found.fixes[0]


def test_objects_go_after_the_sessions_that_make_them_and_before_the_name_that_finds_them(shelve):
    seen, shelf = shelve("a")
    remove_dead_runs(shelf, runs_of(seen, "dead"), 15.0)
    assert shelf.still_there == {"rlflame-a"}
    assert shelf.names == set()


def test_a_run_whose_objects_cannot_be_deleted_is_found_again(shelve):
    seen, shelf = shelve("a")
    shelf.cache_is_away = True
    found = remove_dead_runs(shelf, runs_of(seen, "dead"), 15.0)
    assert found.status == "failed"
    assert shelf.names == {"rlflame-a"}
    assert "not removed: rlflame-a, The cluster did not answer" in found.notes[0]
    assert "object cache" in found.fixes[0]
    assert "--clean" in found.fixes[0]
    shelf.cache_is_away = False
    again = remove_dead_runs(shelf, runs_of(seen, "dead"), 15.0)
    assert again.status == "ok"
    assert shelf.names == set()
    assert shelf.deleted == ["rlflame-a/*", "rlflame-a-i/*"]


def test_what_is_gone_already_is_no_obstacle(shelve):
    seen, shelf = shelve("a")
    shelf.open.clear()
    shelf.names.clear()
    found = remove_dead_runs(shelf, runs_of(seen, "dead"), 15.0)
    assert found.status == "ok"
    assert shelf.deleted == ["rlflame-a/*", "rlflame-a-i/*"]


# Answers of executors.

HERE = {
    "host": "here",
    "python": "3.11.9",
    "packages": {"numpy": "2.1.0", "gymnasium": "1.2.0", "mujoco": "3.3.1"},
    "cores": 4,
    "memory_bytes": 8 * GIB,
    "system": "linux-x86_64",
    "libc": "glibc-2.36",
    "processor": "A processor",
    "folder": "/somewhere",
    "pid": 1,
}


def answered(*changes, **more) -> dict[str, object]:
    greetings = [{**HERE, "pid": i, **change} for i, change in enumerate(changes)]
    answers = ProbeResult(len(changes), 1.5, greetings, [0.01] * 20, **more)
    return {found.check: found for found in executor_probe.make_findings(answers, HERE)}


def test_executors_like_this_machine_are_fine():
    found = answered({}, {"host": "there"})
    assert {one.status for one in found.values()} == {"ok"}
    assert "2 executors on 2 hosts answered, the first after 1.5 s" in found["probe"].text


def test_packages_that_differ_and_packages_that_are_absent():
    other = {"packages": {**HERE["packages"], "mujoco": "3.2.0"}, "host": "odd"}
    bare = {"packages": {"numpy": "2.1.0"}, "host": "bare"}
    found = answered({}, other, bare)["packages"]
    assert found.status == "warning"
    assert "mujoco 3.2.0 (here 3.3.1) on odd" in found.text
    assert "gymnasium, mujoco absent on bare" in found.text
    assert "last bits" in found.text
    assert "installs" in found.text


@pytest.mark.parametrize("name", ["processor", "libc", "system", "python"])
def test_machines_that_may_compute_other_last_bits(name):
    found = answered({}, {name: "another", "host": "odd"})["workers"]
    assert found.status == "warning"
    assert "another (here" in found.text
    assert "odd" in found.text
    assert "bit-identical" in found.text


@pytest.mark.parametrize(
    ("round_trips_ms", "p50_ms", "p95_ms"),
    [(range(20, 0, -1), 10.0, 19.0), ([7.0], 7.0, 7.0)],  # ten of twenty values are at most 10
)
def test_percentiles_of_round_trips(round_trips_ms, p50_ms, p95_ms):
    answers = ProbeResult(1, 1.0, [], [value / 1000 for value in round_trips_ms])
    (found,) = [one for one in executor_probe.make_findings(answers, HERE) if one.check == "tasks"]
    assert (found.facts["p50_ms"], found.facts["p95_ms"]) == pytest.approx((p50_ms, p95_ms))


def test_the_response_time_of_the_session_manager_is_in_milliseconds():
    found = cluster_check.check_session_manager(
        SimpleNamespace(endpoint="http://here:1", connect=lambda: 0.25)
    )
    assert found.text == "answers at http://here:1 in 250 ms"
    assert found.facts == {"answer_ms": 250.0}


def test_slow_tasks_are_reported():
    answers = ProbeResult(1, 1.0, [], [0.5] * 20)
    (found,) = [one for one in executor_probe.make_findings(answers, HERE) if one.check == "tasks"]
    assert (found.status, found.facts["p50_ms"]) == ("warning", 500.0)


def test_an_executor_that_fails_its_tasks_or_stays_silent_fails_the_probe():
    broken = answered({}, problem="A small task failed (no room on disk).", hint="look")["probe"]
    assert broken.status == "failed"
    assert "no room on disk" in broken.text
    assert broken.fixes[0] == "look"
    silent = answered(problem="No executor answered.", hint="rlflame cluster-check")
    assert "FLAME_HOME/logs" in silent["probe"].fixes[0]


def test_a_probe_that_could_not_be_removed_says_so():
    found = answered({}, cleanup_problem="Cannot close session")["probe"]
    assert found.status == "warning"
    assert "--clean" in found.fixes[0]


# The code for executors.


def test_what_executors_load_holds_no_bytecode():
    """Executors may use another Python, in which this bytecode ends the process."""
    names, strings = set(), []
    for code, argument, _ in pickletools.genops(bundle.make_context(b"zip", {"a": 1})):
        if isinstance(argument, str):
            strings.append(argument)
        if code.name == "STACK_GLOBAL":
            names.add(".".join(strings[-2:]))
    assert names == {"flamepy.runner.types.RunnerContext", "builtins.type", "builtins.eval"}


def test_what_executors_load_is_the_loader():
    """It runs in a new process, as on an executor, and removes what it has unpacked."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("shipped_alone.py", "WORD = 'here'\n")
    context = bundle.make_context(packed.getvalue(), {"a": 1})
    code = """
import pickle, sys
loaded = pickle.load(sys.stdin.buffer).execution_object
worker = loaded()
import shipped_alone
print(loaded.__name__, loaded.settings, worker.ping().to_pylist(), shipped_alone.WORD)
"""
    said = subprocess.run(
        [sys.executable, "-c", code], input=context, capture_output=True, check=True
    )
    assert said.stdout.decode().strip() == "RlflameWorker {'a': 1} [] here"


# Configuration.


@pytest.fixture
def no_flame(monkeypatch, tmp_path):
    for name in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE", "FLAME_CACHE_STORAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_nothing_configured(no_flame):
    cluster, found = cluster_check.check_configuration()
    assert cluster is None
    assert found.status == "failed"
    assert any("export FLAME_ENDPOINT" in fix for fix in found.fixes)


@pytest.mark.parametrize(
    ("endpoint", "cache", "fix"),
    [
        ("somewhere:8080", "grpc://somewhere:9090", "export FLAME_ENDPOINT=http://somewhere:8080"),
        ("grpc://somewhere:8080", "grpc://somewhere:9090", "FLAME_ENDPOINT=http://HOST:8080"),
        ("http://somewhere:80x", "grpc://somewhere:9090", "FLAME_ENDPOINT=http://HOST:8080"),
        ("http://somewhere:8080", "somewhere:9090", "FLAME_CACHE_ENDPOINT=grpc://somewhere:9090"),
        ("http://somewhere:8080", "http://somewhere:9090", "FLAME_CACHE_ENDPOINT=grpc://HOST:9090"),
        ("http://somewhere:8080", "grpc://somewhere:9090", ""),
        ("https://somewhere", "grpcs://elsewhere", ""),
        ("http://127.0.0.1:8080", None, ""),
    ],
)
def test_addresses(no_flame, monkeypatch, endpoint, cache, fix):
    monkeypatch.setenv("FLAME_ENDPOINT", endpoint)
    if cache is not None:
        monkeypatch.setenv("FLAME_CACHE_ENDPOINT", cache)
    cluster, found = cluster_check.check_configuration()
    assert (cluster is not None) == (not fix)
    assert found.status == ("failed" if fix else "ok")
    assert fix in " ".join(found.fixes)
    wrong = "FLAME_CACHE_ENDPOINT" if "_CACHE_" in fix else "FLAME_ENDPOINT"
    assert wrong in found.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty"),
        ("contexts: []\n", "current-context is not set"),
        ("current-context: a\ncontexts: []\n", "context <a> not found"),
        ("a: b: c\n", "line 1"),
    ],
)
@pytest.mark.parametrize("also", [False, True])
def test_a_file_that_cannot_be_read_is_named(no_flame, monkeypatch, content, words, also):
    """The file is read first, so it is an error even if the variables are enough."""
    path = no_flame / ".flame" / "flame.yaml"
    path.parent.mkdir()
    path.write_text(content)
    if also:
        monkeypatch.setenv("FLAME_ENDPOINT", "http://127.0.0.1:8080")
    cluster, found = cluster_check.check_configuration()
    assert cluster is None
    assert words in found.text
    assert found.text.count(str(path)) == 1
    assert f"mv {path}" in found.fixes[0]


def test_a_readable_file_is_reported(no_flame):
    path = no_flame / ".flame" / "flame.yaml"
    path.parent.mkdir()
    path.write_text(
        "current-context: a\ncontexts:\n- name: a\n  cluster: {endpoint: 'http://m:8080'}\n"
        "  cache: {endpoint: 'grpc://c:9090'}\n"
    )
    cluster, found = cluster_check.check_configuration()
    assert cluster is not None
    assert found.status == "ok"
    assert found.text == f"{path}: http://m:8080, cache grpc://c:9090"


# Renderers.


def test_renderers_that_crash_or_hang_are_distinguished_from_working_ones(tmp_path, monkeypatch):
    code = """
import os, signal, sys, time
name = os.environ["MUJOCO_GL"]
if name == "egl" or name == "cgl":
    os.kill(os.getpid(), signal.SIGSEGV)
if name == "osmesa":
    sys.exit("libOSMesa.so cannot be opened")
if name == "glfw":
    time.sleep(100)
"""
    (tmp_path / "trial.py").write_text(code)
    working = "import os; assert os.environ['MUJOCO_GL'] == 'glfw'"
    (tmp_path / "glfw_trial.py").write_text(working)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = check_graphics("trial", timeout_s=1.0)
    assert found.status == "warning"
    assert found.fixes == (find_install_command(),)
    if "osmesa" in BACKENDS:
        assert found.facts["reasons"] == {
            "egl": "exit code -11",
            "osmesa": "libOSMesa.so cannot be opened",
            "glfw": "no answer within 1 s",
        }
    drawn = check_graphics("glfw_trial", 30.0)
    assert (drawn.status, drawn.facts["works"]) == ("ok", ["glfw"])
