"""The stub against the unmodified flamepy client: what Flame v0.6.0 does, and how it fails.

Workers are real processes. Their start takes a second of processor time, so most tests share one
executor and one session, whose function does what each test asks of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import cloudpickle
import flamepy
import numpy as np
import pyarrow as pa
import pytest
from flame_stub import Faults, FlameStub
from flamepy.core import cache
from flamepy.core.client import ConnectionInstance
from flamepy.proto.frontend_pb2 import WatchTaskRequest
from flamepy.runner import Runner, RunnerRequest

# Functions of this file go to workers by value, as those of a script do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Nothing here takes nearly as long; a wait that ends after it has failed.
PATIENCE_S = 30


def perform(what: str, value: Any = None) -> Any:
    """What the shared worker can be asked to do."""
    import os
    import sys
    import time

    if what == "fail":
        raise ValueError(value)
    if what == "die":
        os._exit(value)
    if what == "exit":
        sys.exit(value)
    if what == "array":
        import numpy

        return numpy.arange(value)
    if what == "place":
        return {"cwd": os.getcwd(), "pid": os.getpid(), "environment": dict(os.environ)}
    if what == "wait":
        begun, until = value
        with open(begun, "a") as file:
            file.write("begun\n")
        while not os.path.exists(until):
            time.sleep(0.01)
    return value


def eventually(condition: Callable[[], Any]) -> Any:
    """What the condition yields as soon as that is true."""
    for _ in range(PATIENCE_S * 100):
        if found := condition():
            return found
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


def has_begun(file: Path, times: int = 1) -> None:
    """Wait until that many "wait" have written their line; the file is there before it."""
    eventually(lambda: file.exists() and file.read_text() == "begun\n" * times)


def lives(pid: int | None) -> bool:
    """Whether it runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the user's, and a folder of its own to package."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.chdir(tmp_path_factory.mktemp("work"))


class Meet:
    """Points flamepy at a stub, and away from it again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, stub: FlameStub) -> FlameStub:
        FlameStub.reset_client()
        for name, value in stub.environment().items():
            self._monkeypatch.setenv(name, value)
        return stub


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meet]:
    yield Meet(monkeypatch)
    FlameStub.reset_client()


@pytest.fixture(scope="module")
def one_executor() -> Iterator[FlameStub]:
    with FlameStub(executors=1) as stub:
        yield stub


@pytest.fixture
def shared(one_executor: FlameStub, meet: Meet) -> Iterator[FlameStub]:
    """One executor for many tests; each finds it without faults, most with its worker bound."""
    yield meet(one_executor)
    for name, value in vars(Faults()).items():
        setattr(one_executor.faults, name, value)


@pytest.fixture
def work(shared: FlameStub) -> Work:
    return Work("work")


class Work:
    """Tasks of one session, by the means of flamepy's core."""

    def __init__(self, session_id: str, application: str = "flmrun", **spec: Any) -> None:
        from flamepy.runner import RunnerContext

        context = RunnerContext(perform)
        data = cache.put_object(f"{application}/{session_id}", cloudpickle.dumps(context)).encode()
        spec = {"id": session_id, "application": application, "common_data": data} | spec
        self.session = flamepy.open_session(session_id, flamepy.SessionAttributes(**spec))

    def submit(self, what: str, value: Any = None) -> Any:
        request = RunnerRequest(args=(what, value))
        return self.session.run(cloudpickle.dumps(request))

    def result(self, future: Any) -> Any:
        reference = cache.ObjectRef.decode(future.result(PATIENCE_S))
        return cache.get_object(reference)

    def do(self, what: str, value: Any = None) -> Any:
        return self.result(self.submit(what, value))

    def events(self) -> list[tuple[int, str]]:
        found = flamepy.get_session(self.session.id).events
        return [(event.code, event.message) for event in found]


def failure(future: Any) -> str:
    return str(future.exception(PATIENCE_S))


# A run from start to end


def test_a_runner_packages_serves_and_leaves_nothing(meet: Meet) -> None:
    Path("shipped.py").write_text("WORD = 'from the package'\n")
    Path("src/inner").mkdir(parents=True)
    Path("src/inner/__init__.py").write_text("NUMBER = 42\n")
    Path("src/rlflame.py").write_text("PLACE = __file__\n")

    def look(factor: int) -> tuple[Any, ...]:
        import importlib

        inner, shipped, ours = map(importlib.import_module, ("inner", "shipped", "rlflame"))
        try:
            importlib.import_module("gymnasium")
        except ModuleNotFoundError as missing:
            return shipped.WORD, factor * inner.NUMBER, ours.PLACE, missing.name
        return ()

    class Counter:
        def __init__(self) -> None:
            self.calls = 0

        def add(self, weights: np.ndarray, more: int) -> np.ndarray:
            self.calls += 1
            return weights * more + self.calls

    before = set(threading.enumerate())
    with FlameStub(executors=2, hidden=["rlflame", "gymnasium"]) as stub:
        meet(stub)
        with Runner("end-to-end", fail_if_exists=True) as runner:
            assert stub.applications() == ["end-to-end"]
            assert "end-to-end/pkg/end-to-end.tar.gz" in stub.objects()
            word, number, place, missing = runner.service(look, warmup=1)(2).get()
            assert (word, number, missing) == ("from the package", 84, "gymnasium")
            assert place.endswith("src/src/rlflame.py")

            counter = runner.service(Counter, autoscale=False, warmup=1)
            weights = runner.put_object(np.array([1.0, 2.0]))
            first = counter.add(weights, 10)
            second = counter.add(first, 1)
            np.testing.assert_array_equal(second.get(), [13.0, 23.0])

            pids = [executor.pid for executor in stub.executors() if executor.pid]
            assert len(pids) == 2
            assert all(map(lives, pids))
            assert stub.cache_bytes == sum(stub.objects().values()) > 0
        assert stub.applications() == []
        assert stub.objects() == {}
        eventually(lambda: not stub.executors())
        root = Path(place).parents[8]
        assert root.name.startswith("flame-")
        port = urlparse(stub.environment()["FLAME_ENDPOINT"]).port
        FlameStub.reset_client()
    assert not any(map(lives, pids))
    assert not root.exists()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port or 0), 1)


def test_a_stub_closes_while_tasks_run_and_workers_start(meet: Meet, tmp_path: Path) -> None:
    with FlameStub(executors=2) as stub:
        work = [meet(stub), Work("work")][1]
        work.submit("wait", (tmp_path / "begun", tmp_path / "never"))
        has_begun(tmp_path / "begun")
        work.submit("echo")
        pids = [e.pid for e in eventually(stub.executors) if e.pid]
        FlameStub.reset_client()
    assert pids
    assert not any(map(lives, pids))
    assert "Invoking task: 1" in "".join(stub.logs().values())


KILLED = """
import os, signal
from flame_stub import FlameStub
from test_flame_stub import Work

with FlameStub(executors=1) as stub:
    os.environ.update(stub.environment())
    place = Work("work").do("place")
    print(place["pid"], place["cwd"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")
def test_workers_do_not_outlive_a_stub_that_is_killed() -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED],
        cwd=Path(__file__).parent,  # which holds this module
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL
    worker, folder = run.stdout.decode().split()
    eventually(lambda: not lives(int(worker)))
    shutil.rmtree(Path(folder).parents[1])


# Workers


def test_a_worker_has_a_fresh_folder_and_flames_variables(shared: FlameStub, work: Work) -> None:
    place = work.do("place")
    [executor] = shared.executors()
    assert (executor.state, executor.session, executor.node) == ("Bound", "work", "node-1")
    assert place["pid"] == executor.pid
    assert os.path.basename(place["cwd"]) == executor.id
    assert sorted(os.listdir(place["cwd"])) == [f"{executor.id}.err", f"{executor.id}.out", "work"]
    variables = place["environment"]
    assert variables["TMPDIR"] == os.path.join(place["cwd"], "work", "flmrun", "tmp")
    assert variables["PYTHONPATH"].endswith(
        "/lib/python{}.{}/site-packages".format(*sys.version_info)
    )
    for name, value in shared.environment().items():
        assert variables[name] == value
    assert os.getsid(place["pid"]) == place["pid"]


def test_results_come_by_reference_and_as_arrays(work: Work) -> None:
    found = work.do("array", 3)
    np.testing.assert_array_equal(found, [0, 1, 2])
    assert not found.flags.writeable
    payload = {"weights": np.ones(3), "name": "x"}
    assert work.do("echo", payload)["name"] == "x"
    reference = cache.put_object("flmrun/shared", [1, 2])
    assert work.do("echo", reference) == [1, 2]


def test_an_exceptions_text_is_only_in_the_tasks_events(work: Work) -> None:
    future = work.submit("fail", "the reason")
    assert failure(future) == "Task failed without error message (code: 3)"
    task = work.session.get_task(future._task_id)
    assert [event.code for event in task.events] == [0, 1, 3]
    assert task.events[-1].message == "the reason"


def test_a_watch_shows_changes_only_and_no_events(shared: FlameStub, work: Work) -> None:
    request = cloudpickle.dumps(RunnerRequest(args=("fail", "why")))
    task = work.session.create_task(request)
    states = [(int(seen.state), len(seen.events)) for seen in work.session.watch_task(task.id)]
    assert states[-1] == (3, 0)
    assert (0, 0) not in states
    work.session.get_task(task.id)
    [again] = list(work.session.watch_task(task.id))
    assert [event.message for event in again.events][-1] == "why"
    assert list(work.session.watch_task("9999")) == []


def test_a_watch_that_a_get_task_has_met_shows_events_until_the_next_change(
    shared: FlameStub, work: Work, tmp_path: Path
) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    future = work.submit("wait", (begun, until))
    has_begun(begun)
    assert len(work.session.get_task(future._task_id).events) == 2
    until.touch()
    work.result(future)
    [last] = list(work.session.watch_task(future._task_id))
    assert last.events == []


def test_an_executor_is_let_go_after_delay_release(shared: FlameStub, work: Work) -> None:
    before = work.do("place")["pid"]
    shared.expire_idle()
    eventually(lambda: not shared.executors())
    assert not lives(before)
    assert work.do("place")["pid"] != before


def test_system_exit_is_never_answered(meet: Meet) -> None:
    with FlameStub(executors=1) as stub:
        work = [meet(stub), Work("work")][1]
        future = work.submit("exit", 1)
        eventually(lambda: "Invoking task: 1" in "".join(stub.logs().values()))
        with pytest.raises(flamepy.FlameError, match="Cannot close session with running tasks"):
            work.session.close()
        assert not future.done()
        FlameStub.reset_client()


def test_an_applications_folder_and_variables_reach_its_workers(
    meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prepared.py").write_text("")
    with FlameStub(executors=1, worker_path=[str(tmp_path)]) as stub:
        meet(stub)
        template = flamepy.get_application("flmrun")
        variables = {"TMPDIR": "/tmp/of-its-own", "PYTHONPATH": "/more", "COLOUR": "blue"}
        attributes = flamepy.ApplicationAttributes(
            command=template.command,
            installer=template.installer,
            working_directory=str(tmp_path / "place"),
            environments=variables,
            delay_release=0,
        )
        flamepy.register_application("app", attributes)
        place = Work("work", application="app").do("place")
        assert place["cwd"] == str(tmp_path / "place")
        assert place["environment"]["PYTHONPATH"].endswith(f"/site-packages:{tmp_path}:/more")
        assert {n: place["environment"][n] for n in ("TMPDIR", "COLOUR")} == {
            "TMPDIR": "/tmp/of-its-own",
            "COLOUR": "blue",
        }
        eventually(lambda: not stub.executors())  # delay_release is over at once.
        FlameStub.reset_client()
    logs = [path.suffix for path in (tmp_path / "place").iterdir()]
    assert sorted(logs) == [".err", ".out"]


# Applications, sessions and tasks, without any worker


@pytest.fixture
def idle(meet: Meet) -> Iterator[FlameStub]:
    with FlameStub(executors=1, faults=Faults(no_executors=True)) as stub:
        yield meet(stub)
        FlameStub.reset_client()


def test_applications_are_refused_in_flames_words(idle: FlameStub) -> None:
    attributes = flamepy.ApplicationAttributes(command="x")
    for name, text in [
        ("", "cannot be empty"),
        ("a" * 254, "exceeds maximum length of 253"),
        ("a/b", "path traversal"),
        (".a", "cannot start with '.' or '-'"),
        ("a b", "only alphanumeric"),
    ]:
        with pytest.raises(flamepy.FlameError, match=text):
            flamepy.register_application(name, attributes)
    flamepy.register_application("app", attributes)
    with pytest.raises(flamepy.FlameError, match="Application 'app' already exists"):
        flamepy.register_application("app", attributes)
    found = flamepy.get_application("app")
    assert (found.command, found.delay_release, found.max_instances) == ("x", 60, 1_000_000)
    assert flamepy.get_application("other") is None
    names = {application.name for application in flamepy.list_applications()}
    assert names == {"app", "flmrun", "flmping", "flmexec"}
    session = flamepy.create_session("app", session_id="s")
    with pytest.raises(flamepy.FlameError, match="Cannot unregister application 'app'"):
        flamepy.unregister_application("app")
    session.close()
    flamepy.unregister_application("app")
    assert idle.applications() == []
    assert idle.sessions() == []


def test_sessions_open_close_and_are_compared(idle: FlameStub) -> None:
    def opened(session_id: str, **spec: Any) -> Any:
        attributes = flamepy.SessionAttributes(id=session_id, application="flmrun", **spec)
        return flamepy.open_session(session_id, attributes)

    def code(call: Callable[[], Any]) -> Any:
        with pytest.raises(flamepy.FlameError) as refused:
            call()
        return refused.value.code

    errors = flamepy.FlameErrorCode
    assert code(lambda: flamepy.open_session("s")) == errors.NOT_FOUND
    assert opened("s", common_data=b"one", max_instances=2).common_data() == b"one"
    assert opened("s", common_data=b"two", max_instances=2).common_data() == b"one"
    assert code(lambda: opened("s", max_instances=3)) == errors.INVALID_ARGUMENT
    assert code(lambda: opened("s")) == errors.INVALID_ARGUMENT
    unknown = flamepy.SessionAttributes(id="t", application="unknown")
    assert code(lambda: flamepy.open_session("t", unknown)) == errors.NOT_FOUND

    session = flamepy.open_session("s")
    tasks = [session.create_task(b"x") for _ in range(3)]
    assert [task.id for task in tasks] == ["1", "2", "3"]
    future = session.run(b"x")
    closed = flamepy.close_session("s")
    assert (int(closed.state), closed.pending) == (1, 0)
    assert [task.state for task in idle.tasks("s")] == ["Cancelled"] * 4
    assert failure(future) == "failed to watch task: 4 is not a valid TaskState (code: 3)"
    assert code(lambda: opened("s")) == errors.INVALID_ARGUMENT
    with pytest.raises(flamepy.FlameError, match="Cannot create task in closed session"):
        session.create_task(b"x")


def test_a_watch_does_not_echo_pending(idle: FlameStub) -> None:
    session = flamepy.create_session("flmrun", session_id="s")
    task = session.create_task(b"x")
    frontend = ConnectionInstance.instance()._frontend
    stream = frontend.WatchTask(WatchTaskRequest(session_id="s", task_id=task.id))
    eventually(lambda: idle.open_watches == 1)
    session.close()
    assert [message.status.state for message in stream] == [4]
    eventually(lambda: idle.open_watches == 0)


def test_an_input_of_more_than_four_mebibytes_is_refused(idle: FlameStub) -> None:
    session = flamepy.create_session("flmrun", session_id="s")
    session.create_task(bytes(4 * 1024 * 1024 - 100))
    with pytest.raises(flamepy.FlameError, match="the limit is: 4194304 bytes"):
        session.create_task(bytes(4 * 1024 * 1024))
    assert len(idle.tasks("s")) == 1


def test_nodes_are_listed_with_ghosts(idle: FlameStub) -> None:
    idle.faults.ghost_node = "former"
    nodes = {node.metadata.name: node for node in flamepy.list_nodes()}
    assert {name: node.status.state for name, node in nodes.items()} == {"node-1": 1, "former": 2}
    assert nodes["node-1"].status.capacity.cpu == 1
    assert nodes["node-1"].status.allocatable == nodes["node-1"].status.capacity


def test_a_slow_create_task_has_not_happened_yet(idle: FlameStub) -> None:
    session = flamepy.create_session("flmrun", session_id="s")
    idle.faults.create_task_s = 3600.0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(session.create_task, b"x")
        assert flamepy.get_session("s").pending == 0
        assert not waiting.done()
        idle.faults.create_task_s = 0.0
        assert waiting.result(PATIENCE_S).id == "1"


def test_a_missing_template_stops_a_runner(idle: FlameStub) -> None:
    idle.faults.flmrun_missing = True
    with pytest.raises(flamepy.FlameError, match="no attribute 'working_directory'"):
        Runner("app")
    assert "flmrun" not in {application.name for application in flamepy.list_applications()}


# The cache


def test_the_cache_keeps_versions_and_patches(idle: FlameStub) -> None:
    reference = cache.put_object("app/one", {"a": 1})
    assert (reference.endpoint, reference.version) == (
        idle.environment()["FLAME_CACHE_ENDPOINT"],
        1,
    )
    assert cache.get_object(reference) == {"a": 1}
    assert cache.get_object(reference) is cache.get_object(reference)  # Not modified.
    patched = cache.patch_object(reference, {"b": 2})
    assert patched.version == 2

    def merge(base: dict[str, int], patches: list[dict[str, int]]) -> dict[str, int]:
        return {key: value for part in [base, *patches] for key, value in part.items()}

    assert cache.get_object(patched, merge) == {"a": 1, "b": 2}
    updated = cache.update_object(reference, {"c": 3})
    assert updated.version == 3
    assert cache.get_object(updated, merge) == {"c": 3}
    table = pa.table({"x": [1, 2]})
    kept = cache.put_object("app/two", table)
    assert cache.get_object(kept) == table
    assert cache.get_object(kept) is cache.get_object(kept)
    assert sorted(key.rpartition("/")[0] for key in idle.objects()) == ["app/one", "app/two"]
    cache.delete_objects("app/one")
    cache.delete_objects("app/nothing")
    assert list(idle.objects()) == [kept.key]
    cache.put_object("apple/one", 1)
    cache.delete_objects("app/*")
    assert [key.split("/")[0] for key in idle.objects()] == ["apple"]
    with pytest.raises(KeyError, match=f"object <{kept.key}> not found"):
        cache.get_object(kept)
    with pytest.raises(KeyError, match="not found for patch"):
        cache.patch_object(kept, 1)


def test_the_cache_loses_hides_and_evicts(idle: FlameStub) -> None:
    one, two = cache.put_object("app/one", 1), cache.put_object("app/two", 2)
    idle.faults.cache_missing_prefix = "app/one"
    idle.faults.cache_missing = 1
    assert cache.get_object(two) == 2
    with pytest.raises(KeyError):
        cache.get_object(one)
    assert cache.get_object(one) == 1
    idle.faults.cache_missing = True
    for _ in range(2):
        with pytest.raises(KeyError):
            cache.get_object(one)
    assert len(idle.objects()) == 2
    idle.faults.reference_endpoint = "grpc://127.0.0.1:1"
    assert cache.put_object("app/one", 3).endpoint == "grpc://127.0.0.1:1"
    idle.evict_all()
    assert idle.objects() == {}
    with pytest.raises(KeyError):
        cache.get_object(two)


def test_the_cache_goes_and_comes_back(idle: FlameStub) -> None:
    kept = cache.put_object("app/one", 1)
    idle.stop_cache()
    with pytest.raises(pa.flight.FlightUnavailableError):
        cache.get_object(kept)

    def again() -> Any:
        try:
            return cache.get_object(kept)
        except pa.flight.FlightUnavailableError:
            return None

    idle.start_cache()
    assert eventually(again) == 1
    idle.restart_cache(lose=True)
    with pytest.raises(KeyError):
        eventually(again)


# Faults of tasks


def test_tasks_fail_and_are_cancelled_on_demand(shared: FlameStub, work: Work) -> None:
    shared.faults.fail_tasks, shared.faults.fail_text = 1, "as asked"
    future = work.submit("echo", 1)
    assert failure(future) == "Task failed without error message (code: 3)"
    assert work.session.get_task(future._task_id).events[-1].message == "as asked"
    shared.faults.hide_events = True
    assert work.session.get_task(future._task_id).events == []
    shared.faults.cancel_tasks = 1
    cancelled = work.submit("echo", 1)
    assert failure(cancelled) == "failed to watch task: 4 is not a valid TaskState (code: 3)"
    with pytest.raises(ValueError, match="4 is not a valid TaskState"):
        work.session.get_task(cancelled._task_id)
    assert work.do("echo", 2) == 2


def test_watches_end_without_a_terminal_state(shared: FlameStub, work: Work) -> None:
    work.do("echo")
    shared.faults.watch_ends = 1
    cut = work.submit("echo", 1)
    eventually(lambda: shared.faults.watch_ends == 0)
    shared.faults.watch_empty = True
    eventually(lambda: shared.tasks("work")[-1].state == "Succeed")
    task = work.session.get_task(cut._task_id)
    assert list(work.session.watch_task(task.id)) == []
    shared.faults.watch_empty = False
    assert len(list(work.session.watch_task(task.id))) == 1
    assert not cut.done()
    shared.faults.get_task_errors = 1
    with pytest.raises(flamepy.FlameError, match="failed to get task: failed on demand"):
        work.session.get_task(task.id)
    assert work.session.get_task(task.id).output == task.output


def test_close_is_refused_on_demand_and_while_a_task_runs(
    shared: FlameStub, work: Work, tmp_path: Path
) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    running = work.submit("wait", (begun, until))
    has_begun(begun)
    pending = work.submit("echo", 5)
    with pytest.raises(flamepy.FlameError, match="Cannot close session with running tasks"):
        work.session.close()
    until.touch()
    work.result(running)
    assert work.result(pending) == 5
    shared.faults.close_refused = 1
    with pytest.raises(flamepy.FlameError, match="Cannot close session with running tasks"):
        work.session.close()


# Faults of binding


def test_a_session_that_cannot_be_entered_waits_for_ever(idle: FlameStub) -> None:
    idle.faults.bind_failure = "No module named 'mine'"
    idle.faults.no_executors = False
    work = Work("work")
    work.submit("echo")
    events = eventually(lambda: found if len(found := work.events()) == 6 else None)
    assert [code for code, _ in events] == [1001] * 5 + [1002]
    text = "failed to bind session with return_code <12>: on_session_enter failed: No module named"
    assert all(text in said for _, said in events[:5])
    assert "Session retry limit reached after 5/5" in events[5][1]
    assert idle.sessions()[0].events == tuple(events)
    eventually(lambda: not idle.executors())
    idle.faults.bind_failure = ""
    assert idle.tasks("work")[0].state == "Pending"
    assert idle.executors() == []


def test_a_function_that_a_worker_cannot_import_is_an_event(
    meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with FlameStub(executors=1) as stub:
        meet(stub)
        with Runner("flmrun") as runner:
            runner.service(only_here.double)(1)
            [session] = stub.sessions()
            event = eventually(lambda: flamepy.get_session(session.id).events)[0]
        FlameStub.reset_client()
    assert event.code == 1001
    assert "on_session_enter failed: No module named 'only_here'" in event.message


def test_another_python_cannot_be_installed(idle: FlameStub) -> None:
    with Runner("app", python_version="2.7") as runner:
        idle.faults.no_executors = False
        runner.service(perform)("echo")
        [session] = idle.sessions()
        events = eventually(lambda: flamepy.get_session(session.id).events)
        assert events[0].code == 1001
        assert "return_code <10>: application installation failed" in events[0].message


def test_a_package_that_is_gone_cannot_be_installed(idle: FlameStub) -> None:
    with Runner("app") as runner:
        cache.delete_objects("app/pkg/app.tar.gz")
        idle.faults.no_executors = False
        runner.service(perform)("echo")
        [session] = idle.sessions()
        events = eventually(lambda: flamepy.get_session(session.id).events)
        assert "object <app/pkg/app.tar.gz> not found" in events[0].message


def test_a_cold_start_shows_as_binding(idle: FlameStub) -> None:
    idle.faults.cold_start_s = 3600.0
    idle.faults.no_executors = False
    work = Work("work")
    future = work.submit("echo", 1)
    eventually(lambda: [e.state for e in idle.executors()] == ["Binding"])
    assert idle.executors()[0].pid is None
    [listed] = flamepy.list_executors()
    assert (listed.status.state, listed.status.session_id) == (3, "work")
    idle.faults.cold_start_s = 0.0
    assert work.result(future) == 1


# Who gets an executor


def test_an_executor_that_stays_void_takes_one_sessions_turn(meet: Meet) -> None:
    with FlameStub(executors=3, faults=Faults(cold_start_s=3600.0, stuck_void=True)) as stub:
        meet(stub)
        work = Work("work")
        work.submit("echo")
        work.submit("echo")
        assert [(e.state, e.session) for e in stub.executors()] == [("Void", None)]
        stub.faults.stuck_void = False
        assert [e.state for e in stub.executors()] == ["Void"]
        Work("later").submit("echo")
        eventually(lambda: [e.session for e in stub.executors()] == [None, "later"])
        FlameStub.reset_client()


def test_a_session_that_gave_up_keeps_its_claim(meet: Meet) -> None:
    with FlameStub(executors=2, faults=Faults(bind_failure="no")) as stub:
        meet(stub)
        half = flamepy.ResourceRequirement(cpu=1, memory=4 << 30, gpu=0)
        first, later = Work("first", resreq=half), Work("later", resreq=half)
        first.submit("echo")
        first.submit("echo")
        eventually(lambda: first.events()[-1:] and first.events()[-1][0] == 1002)
        stub.faults.cold_start_s = 3600.0
        later.submit("echo")
        later.submit("echo")
        eventually(lambda: [e.session for e in stub.executors()] == ["later"])
        first.session.close()
        eventually(lambda: [e.session for e in stub.executors()] == ["later"] * 2)
        FlameStub.reset_client()


def test_without_the_gang_policy_nothing_is_ever_started(meet: Meet) -> None:
    with FlameStub(executors=2, policies=["priority", "drf"]) as stub:
        meet(stub)
        Work("work").submit("echo")
        assert stub.executors() == []
        FlameStub.reset_client()


def test_executors_follow_tasks_room_and_fair_shares(meet: Meet) -> None:
    # Nothing binds, so that who was meant to get each executor stays to be seen.
    with FlameStub(executors=4, nodes=2, faults=Faults(cold_start_s=3600.0)) as stub:
        meet(stub)

        def got(session_id: str) -> int:
            return sum(executor.session == session_id for executor in stub.executors())

        first = Work("first", max_instances=3)
        for expected in (1, 2, 3, 3):
            first.submit("echo")
            eventually(lambda n=expected: got("first") == n)
        large = flamepy.ResourceRequirement(cpu=3, memory=1, gpu=0)
        Work("large", resreq=large).submit("echo")
        second = Work("second")
        second.submit("echo")
        second.submit("echo")
        eventually(lambda: got("second") == 1)
        assert (got("first"), got("large")) == (3, 0)
        assert sorted(e.node for e in stub.executors()) == ["node-1", "node-1", "node-2", "node-2"]
        FlameStub.reset_client()


# Dead workers, lost nodes, restarts


def test_a_dead_worker_costs_its_task_and_is_replaced(meet: Meet) -> None:
    with FlameStub(executors=1) as stub:
        work = [meet(stub), Work("work")][1]
        work.submit("die", 7)
        assert work.do("echo", 1) == 1
        assert [task.state for task in stub.tasks("work")] == ["Failed", "Succeed"]
        code, text = stub.tasks("work")[0].events[-1]
        assert code == 3
        assert "UNAVAILABLE" in text
        FlameStub.reset_client()


def test_a_black_hole_swallows_the_queue_and_blocks_the_cluster(meet: Meet) -> None:
    with FlameStub(executors=2, faults=Faults(black_hole=True)) as stub:
        work = [meet(stub), Work("work", max_instances=1)][1]
        assert work.do("echo", 1) == 1
        [executor] = stub.executors()
        queued = [work.submit("place") for _ in range(5)]
        for future in queued:
            work.result(future)
        stub.kill_executor(executor.id, signal.SIGKILL)
        eventually(lambda: not lives(executor.pid))
        for future in [work.submit("echo") for _ in range(8)]:
            assert failure(future).startswith("Task failed")
        [dead] = stub.executors()
        assert (dead.id, dead.state) == (executor.id, "Bound")
        work.session.close()
        eventually(lambda: stub.executors()[0].state == "Unbinding")

        later = Work("later")
        future = later.submit("echo", 2)
        assert [e.id for e in stub.executors()] == [executor.id]
        assert stub.tasks("later")[0].state == "Pending"
        stub.lose_node("node-1")
        assert stub.executors() == []
        stub.return_node("node-1")
        assert later.result(future) == 2
        FlameStub.reset_client()


def test_a_lost_nodes_task_runs_again_elsewhere_or_never(meet: Meet, tmp_path: Path) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    with FlameStub(executors=2, nodes=2) as stub:
        work = [meet(stub), Work("work")][1]
        future = work.submit("wait", (begun, until))
        has_begun(begun)
        [node] = [executor.node for executor in stub.executors()]
        stub.lose_node(node, noticed=False)
        states = {n.metadata.name: n.status.state for n in flamepy.list_nodes()}
        assert states[node] == 0
        assert stub.tasks("work")[0].state == "Running"
        until.touch()
        stub.notice_loss(node)
        states = {n.metadata.name: n.status.state for n in flamepy.list_nodes()}
        assert states[node] == 2
        work.result(future)
        [task] = stub.tasks("work")
        assert (task.state, task.attempts) == ("Succeed", 2)
        assert begun.read_text() == "begun\n" * 2

        until.unlink()
        stub.faults.storage_none = True
        stuck = work.submit("wait", (begun, until))
        has_begun(begun, 3)
        [node] = [executor.node for executor in stub.executors()]
        stub.lose_node(node)
        assert stub.executors() == []
        assert stub.tasks("work")[1].state == "Running"
        assert not stuck.done()

        # Back before anybody noticed: its executors are Bound, and nobody is there.
        stub.return_node("node-1")
        work.do("echo")
        [executor] = stub.executors()
        stub.lose_node("node-1", noticed=False)
        stub.return_node("node-1")
        work.submit("echo")
        assert [(e.id, e.state) for e in stub.executors()] == [(executor.id, "Bound")]
        assert stub.tasks("work")[-1].state == "Pending"
        FlameStub.reset_client()


def test_a_restarted_session_manager_breaks_watches_and_runs_tasks_twice(
    meet: Meet, tmp_path: Path
) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    with FlameStub(executors=2) as stub:
        work = [meet(stub), Work("work")][1]
        for future in [work.submit("wait", (begun, begun)) for _ in range(2)]:
            work.result(future)
        once = work.submit("wait", (begun, until))
        has_begun(begun, 3)
        stub.stop_session_manager()
        assert "failed to watch task" in failure(once)
        with pytest.raises(flamepy.FlameError, match="failed to get task"):
            work.session.get_task("3")
        stub.start_session_manager()
        eventually(lambda: stub.tasks("work")[2].attempts == 2)
        has_begun(begun, 4)
        until.touch()
        eventually(lambda: stub.tasks("work")[2].state == "Succeed")

        def get() -> Any:
            try:
                return work.session.get_task("3")
            except flamepy.FlameError:
                return None

        output = eventually(get).output
        assert cache.get_object(cache.ObjectRef.decode(output)) == (begun, until)
        FlameStub.reset_client()
