"""The stub and the unmodified flamepy client behave as Flame v0.6.0.

Workers are real processes. Starting one takes a second of processor time, so most tests share one
executor and one session, whose function does what each test requests.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import flamepy
import pytest
from flamepy.core import cache
from flamepy.core.client import ConnectionInstance
from flamepy.proto.frontend_pb2 import WatchTaskRequest
from flamepy.runner import RunnerRequest

from flame_stub import Faults, FlameStub

# flamepy pickles functions of this file by value, as it does for scripts.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Nothing in these tests takes nearly as long, so a wait of this length has failed.
PATIENCE_S = 30


def perform(what: str, value: Any = None) -> Any:
    """The operations of the shared worker."""
    import time

    if what == "fail":
        raise ValueError(value)
    if what == "die":
        os._exit(value)
    if what == "place":
        return {"cwd": os.getcwd(), "pid": os.getpid()}
    if what == "wait":
        begun, until = value
        with open(begun, "a") as file:
            file.write("begun\n")
        while not os.path.exists(until):
            time.sleep(0.01)
    return value


def eventually(condition: Callable[[], Any]) -> Any:
    """Wait until the condition returns something true, and return it."""
    for _ in range(PATIENCE_S * 100):
        if found := condition():
            return found
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


def has_begun(file: Path, times: int = 1) -> None:
    """Wait until this number of "wait" operations has written its line."""
    eventually(lambda: file.exists() and file.read_text() == "begun\n" * times)


def lives(pid: int | None) -> bool:
    """Whether a process is running and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder without settings, and an empty folder to package."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.chdir(tmp_path_factory.mktemp("work"))


class Meet:
    """Selects a stub for flamepy, and removes the selection at the end."""

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
    """One executor for many tests. It has no faults, and its worker is usually bound."""
    yield meet(one_executor)
    for name, value in vars(Faults()).items():
        setattr(one_executor.faults, name, value)


@pytest.fixture
def work(shared: FlameStub) -> Work:
    return Work("work")


class Work:
    """Tasks of one session, with flamepy's core interface."""

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


def failure(future: Any) -> str:
    return str(future.exception(PATIENCE_S))


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
        cwd=Path(__file__).parent,  # contains this module
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL
    worker, folder = run.stdout.decode().split()
    eventually(lambda: not lives(int(worker)))
    shutil.rmtree(Path(folder).parents[1])


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


def test_an_executor_is_let_go_after_delay_release(shared: FlameStub, work: Work) -> None:
    before = work.do("place")["pid"]
    shared.expire_idle()
    eventually(lambda: not shared.executors())
    assert not lives(before)
    assert work.do("place")["pid"] != before


@pytest.fixture
def idle(meet: Meet) -> Iterator[FlameStub]:
    with FlameStub(executors=1, faults=Faults(no_executors=True)) as stub:
        yield meet(stub)
        FlameStub.reset_client()


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


def test_the_cache_deletes_what_has_the_prefix_and_nothing_else(idle: FlameStub) -> None:
    reference = cache.put_object("app/one", {"a": 1})
    updated = cache.update_object(reference, {"c": 3})
    assert (updated.version, cache.get_object(updated)) == (2, {"c": 3})
    kept = cache.put_object("app/two", 2)
    cache.delete_objects("app/one")
    cache.delete_objects("app/nothing")
    assert list(idle.objects()) == [kept.key]
    cache.put_object("apple/one", 1)
    cache.delete_objects("app/*")
    assert [key.split("/")[0] for key in idle.objects()] == ["apple"]
    with pytest.raises(KeyError, match=f"object <{kept.key}> not found"):
        cache.get_object(kept)


def test_tasks_fail_and_are_cancelled_on_demand(shared: FlameStub, work: Work) -> None:
    shared.faults.fail_tasks, shared.faults.fail_text = 1, "as asked"
    future = work.submit("echo", 1)
    assert failure(future) == "Task failed without error message (code: 3)"
    assert work.session.get_task(future._task_id).events[-1].message == "as asked"
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


def test_a_lost_nodes_task_runs_again_elsewhere(meet: Meet, tmp_path: Path) -> None:
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
