"""Failures of workers: deaths, hangs, wrong answers, floods, failed starts.

No test waits for a deadline, because the fleet uses a fake clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import rollouts
import typer
from test_base_contract import alone, eventually, slots
from test_worker_main import gone

from rlflame.__main__ import main as command
from rlflame.cli.app import app
from rlflame.errors import EnvironmentFailure, FleetError, RlflameError
from rlflame.fleet import prestart as early_module
from rlflame.fleet.base import FleetEvent
from rlflame.fleet.job_queue import FleetJob, JobQueue
from rlflame.fleet.local import LocalFleet
from rlflame.fleet.prestart import PrestartPool
from rlflame.rollout import wire
from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.task import RolloutTask

FAKE = rollouts.fake(length=5)


class Clock:
    """A clock that moves only when a test sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A local fleet with its clock and events, which waits for threads if needed."""

    def __init__(self, workers: int, **options: Any) -> None:
        self.clock = Clock()
        self.events: list[FleetEvent] = []
        self.fleet = LocalFleet(workers, observer=self.events.append, clock=self.clock, **options)
        self.outcomes: list[Any] = []
        self._waiting: list[threading.Thread] = []

    def start(self, tasks: Sequence[RolloutTask]) -> Any:
        named = [
            dataclasses.replace(task, policy_id=self.fleet.put(rollouts.weights(task.policy)))
            for task in tasks
        ]
        return self.fleet.submit(named)

    def wait_aside(self, submission: Any) -> None:
        def wait() -> None:
            try:
                for fragment in submission:
                    self.outcomes.append(wire.encode(fragment))
            except RlflameError as error:
                self.outcomes.append(error)

        self._waiting.append(threading.Thread(target=wait, daemon=True))
        self._waiting[-1].start()

    def outcome(self) -> Any:
        """The result of the oldest submission that a thread waits for."""
        self._waiting.pop(0).join(60)
        return self.outcomes[-1]

    def told(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]

    def children(self) -> list[Any]:
        return list(self.fleet._pool.workers)

    def stands_at(self, step: int) -> bool:
        return any(child.position and child.position[3] == step for child in self.children())

    def later(self) -> None:
        self.clock.now += 1000.0


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        pids = bench.fleet.list_pids()
        bench.fleet.close()
        assert all(gone(pid) for pid in pids)


@pytest.fixture
def bench(benches: list[Bench]) -> Bench:
    benches.append(Bench(1))
    return benches[0]


@pytest.fixture
def two(benches: list[Bench]) -> Bench:
    benches.append(Bench(2))
    return benches[0]


def test_one_or_three_workers_come_to_the_same_bytes(benches: list[Bench]) -> None:
    """test_base_contract compares two workers with none."""
    env = read_env_spec("Hopper-v5", {}, 25)
    found = []
    for workers in (1, 3):
        benches.append(Bench(workers))
        tasks, run = slots(5, env), b""
        for _ in range(3):
            fragments = sorted(benches[-1].start(tasks), key=lambda fragment: fragment.slot)
            run += b"".join(map(wire.encode, fragments))
            tasks = [rollouts.following(t, f) for t, f in zip(tasks, fragments, strict=True)]
        found.append(run)
    assert found[0] == found[1]


def test_closing_leaves_no_process_behind_not_even_an_environment_s_own(
    two: Bench, tmp_path: Path
) -> None:
    note = tmp_path / "program"
    list(two.start(slots(1, rollouts.fake(fault="start_program", marker=str(note)))))
    program, pids = int(note.read_text()), two.fleet.list_pids()
    assert len(pids) == 2
    assert not gone(program)
    two.fleet.close()
    assert all(gone(pid) for pid in pids)
    assert eventually(lambda: gone(program))
    assert two.fleet.list_pids() == []


def test_closing_in_the_middle_of_a_step_takes_no_answer(bench: Bench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    submission = bench.start(slots(3, rollouts.fake(fault="wait", marker=str(gate))))
    bench.wait_aside(submission)
    assert eventually(gate.with_suffix(".here").exists)
    pids = bench.fleet.list_pids()
    bench.fleet.close()
    assert all(gone(pid) for pid in pids)
    assert "closed" in str(bench.outcome())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_no_descriptor_is_left_open_by_workers_that_come_and_go(tmp_path: Path) -> None:
    before = descriptors()
    bench = Bench(2)
    list(bench.start(slots(4)))
    while_running = descriptors()
    for turn in range(2):
        marker = str(tmp_path / str(turn))
        list(bench.start(slots(2, rollouts.fake(fault="kill_once", marker=marker))))
    assert len(bench.told("retried")) == 2
    assert descriptors() == while_running
    bench.fleet.close()
    assert descriptors() == before


def test_a_worker_killed_in_the_middle_of_its_task_is_replaced_and_nothing_is_lost(
    bench: Bench, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    (task,) = slots(1, rollouts.fake(fault="wait", marker=str(gate)))
    bench.wait_aside(bench.start([task]))
    assert eventually(gate.with_suffix(".here").exists)
    (before,) = bench.fleet.list_pids()
    os.kill(before, signal.SIGKILL)
    gate.touch()
    assert bench.outcome() == alone(task)
    assert bench.told("retried") == ["killed by signal 9, SIGKILL"]
    (after,) = bench.fleet.list_pids()
    assert after != before


def test_every_task_survives_the_death_of_every_first_worker(two: Bench, tmp_path: Path) -> None:
    tasks = [
        task
        for slot, task in enumerate(slots(3))
        for env in [rollouts.fake(fault="kill_once", at=2, marker=str(tmp_path / str(slot)))]
        for task in [dataclasses.replace(task, env=env)]
    ]
    found = {wire.encode(fragment) for fragment in two.start(tasks)}
    assert len(two.told("retried")) == 3
    assert found == {alone(task) for task in tasks}  # no worker dies: the markers exist


@pytest.mark.parametrize("max_retries", [0, 1])
def test_workers_that_die_again_and_again_are_an_end(
    benches: list[Bench], max_retries: int
) -> None:
    benches.append(Bench(1, max_retries=max_retries))
    tasks = slots(1, rollouts.fake(fault="kill"))
    with pytest.raises(FleetError) as caught:
        list(benches[0].start(tasks))
    assert f"died {max_retries + 1} time" in str(caught.value)
    assert "slot 0 of iteration 0" in str(caught.value)
    assert "killed by signal 9, SIGKILL" in str(caught.value)
    assert "memory" in caught.value.hint
    assert len(benches[0].told("retried")) == max_retries
    # The next task runs in a healthy fleet.
    assert [wire.encode(f) for f in benches[0].start(slots(1))] == [alone(slots(1)[0])]


def test_a_death_behind_a_pipe_that_somebody_else_holds_open_is_noticed(
    bench: Bench, tmp_path: Path
) -> None:
    (task,) = slots(1, rollouts.fake(fault="abandon_pipe", marker=str(tmp_path / "once")))
    bench.wait_aside(bench.start([task]))
    assert eventually(lambda: bool(bench.outcomes))
    assert bench.outcomes == [alone(task)]  # the marker exists now
    assert bench.told("retried") == ["killed by signal 9, SIGKILL"]


def test_a_worker_that_died_while_it_was_idle_is_given_no_task(benches: list[Bench]) -> None:
    """The pipe may still be open. The death is not a failure of the next task."""
    benches.append(Bench(1, max_retries=0))
    (bench,) = benches
    list(bench.start(slots(1, FAKE)))
    (child,) = bench.children()
    held = [
        os.open(f"/proc/{child.process.pid}/fd/{name}", os.O_WRONLY)
        for name in os.listdir(f"/proc/{child.process.pid}/fd")
        if os.path.samestat(
            os.stat(f"/proc/{child.process.pid}/fd/{name}"),
            os.fstat(child.process.channel.fileno()),
        )
    ]
    os.kill(child.process.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # the fleet has reaped it already
        os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    assert len(list(bench.start(slots(1, FAKE)))) == 1
    assert bench.told("retried") == []
    for descriptor in held:
        os.close(descriptor)


@pytest.mark.parametrize("where", ["behind what was written", "before anything is"])
def test_ctrl_c_while_a_task_is_handed_out_costs_that_task_alone(
    where: str, benches: list[Bench], monkeypatch: Any
) -> None:
    benches.append(Bench(1, max_retries=0))
    (bench,) = benches
    expected = [wire.encode(fragment) for fragment in bench.start(slots(1, FAKE))]
    (before,) = bench.fleet.list_pids()
    (child,) = bench.children()

    def interrupted(really: Any) -> Any:
        def interrupt(*given: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return really(*given)
            monkeypatch.undo()
            if where == "behind what was written":
                really(*given)
            raise KeyboardInterrupt

        return interrupt

    # The fleet's thread may run first. It must not wait for a result that nobody wants.
    dispatcher = bench.fleet
    cancel = dispatcher.cancel

    def cancel_late(jobs: Any) -> None:
        assert eventually(lambda: child.process.has_exited)
        cancel(jobs)

    dispatcher.cancel = cancel_late
    if where == "behind what was written":
        # As if the interrupt had come between a write and the update of its counter.
        monkeypatch.setattr(os, "writev", interrupted(os.writev))
    else:
        monkeypatch.setattr(child, "send_job", interrupted(child.send_job))
    with pytest.raises(KeyboardInterrupt):
        bench.start(slots(1, FAKE))
    bench.wait_aside(bench.start(slots(1, FAKE)))
    bench.outcome()
    assert bench.outcomes == expected
    assert bench.told("retried") == []
    assert bench.told("cancelled") == [""]
    assert bench.fleet.list_pids() != [before]


def test_an_environment_that_hangs_is_named_after_two_deadlines(bench: Bench) -> None:
    tasks = slots(2, rows=3, steps=30)
    victim = tasks[1].states[2].seed
    env = rollouts.fake(fault="hang", at=4, seed=victim)
    bench.wait_aside(bench.start([dataclasses.replace(task, env=env) for task in tasks]))
    for kind in ("retried", "lost"):
        assert eventually(lambda: bench.stands_at(4))
        assert bench.told(kind) == []
        bench.later()
        assert eventually(lambda kind=kind: bench.told(kind) != [])
    error = bench.outcome()
    assert isinstance(error, EnvironmentFailure)
    assert str(error) == (
        "Environment fakes:Fake-v0 did not answer within 60 s "
        f"(slot 1, row 2, seed {victim}, step 4)."
    )
    assert "runtime.step_deadline_s" in error.hint
    assert [wire.encode(f) for f in bench.start(slots(1))] == [alone(slots(1)[0])]


def test_a_hang_that_keeps_the_interpreter_s_lock_ends_as_well(bench: Bench) -> None:
    """Without heartbeats, the step is unknown, but the slot is known."""
    bench.wait_aside(bench.start(slots(1, rollouts.fake(fault="hang_in_c"))))
    for attempt in range(2):
        assert eventually(lambda n=attempt: len(bench.told("running")) > n)
        bench.later()
        assert eventually(lambda n=attempt: len(bench.told("retried") + bench.told("lost")) > n)
    assert "did not answer within 60 s (slot 0," in str(bench.outcome())


def test_a_hang_that_does_not_repeat_itself_is_forgiven(bench: Bench, tmp_path: Path) -> None:
    (task,) = slots(1, rollouts.fake(fault="hang_once", marker=str(tmp_path / "once")))
    bench.wait_aside(bench.start([task]))
    assert eventually(lambda: bench.stands_at(3))
    bench.later()
    assert bench.outcome() == alone(task)
    assert bench.told("retried") == ["its worker did not answer in time"]


def test_an_environment_that_goes_on_is_not_hanging_however_late_it_is(
    bench: Bench, tmp_path: Path
) -> None:
    """The deadline is for one step. Each heartbeat with progress restarts it."""
    first, second = tmp_path / "first", tmp_path / "second"
    slow = rollouts.fake(fault="wait", at=2, marker=str(first))
    slower = rollouts.fake(fault="wait", at=4, marker=str(second))
    for env, gate, step in ((slow, first, 2), (slower, second, 4)):
        (task,) = slots(1, env, rows=1)
        bench.wait_aside(bench.start([task]))
        assert eventually(lambda step=step: bench.stands_at(step))
        bench.clock.now += 59.0
        gate.touch()
        assert bench.outcome() == alone(task)
    assert bench.told("retried") == []


def test_a_cancelled_task_that_hangs_frees_its_worker_and_is_not_tried_again(
    bench: Bench,
) -> None:
    submission = bench.start(slots(1, rollouts.fake(fault="hang")))
    assert eventually(lambda: bench.stands_at(3))
    submission.cancel()
    assert eventually(lambda: bench.told("cancelled") != [])
    bench.wait_aside(bench.start(slots(1)))
    bench.later()
    assert bench.outcome() == alone(slots(1)[0])
    assert bench.told("retried") == []


def test_a_worker_that_was_stopped_holds_up_nobody_else(two: Bench) -> None:
    """The message is larger than a pipe, so the worker cannot even receive it."""
    two.fleet.probe()
    stopped = two.fleet.list_pids()[0]
    os.kill(stopped, signal.SIGSTOP)
    tasks = slots(4, policy=rollouts.policy_spec(FAKE, hidden=(700, 700)))
    two.wait_aside(two.start(tasks))
    assert eventually(lambda: len(two.outcomes) == 3)
    assert two.children()[0].process.channel.has_backlog
    two.later()
    two.outcome()
    assert set(two.outcomes) == {alone(task) for task in tasks}
    assert stopped not in two.fleet.list_pids()


def test_weights_larger_than_a_pipe_arrive(two: Bench) -> None:
    tasks = slots(4, policy=rollouts.policy_spec(FAKE, hidden=(700, 700)))
    assert {wire.encode(f) for f in two.start(tasks)} == {alone(task) for task in tasks}


def test_workers_forget_weights_that_nobody_holds_any_more(two: Bench) -> None:
    """This includes weights that were released before a worker had received them."""
    tasks = slots(6)
    names = [two.fleet.put(rollouts.weights(tasks[0].policy, seed)) for seed in range(2)]
    early, late = (
        two.fleet.submit([dataclasses.replace(task, policy_id=name) for task in tasks])
        for name in names
    )
    two.fleet.release(names[0])
    list(early)
    list(late)
    assert eventually(lambda: {n for c in two.children() for n in c.policies} == {names[1]})
    two.fleet.release(names[1])
    assert eventually(lambda: not any(child.policies for child in two.children()))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("damage", "sent a damaged answer"),
        ("lie", "not a fragment of this task"),
        ("garble", "sent a frame of unknown kind 255"),
    ],
)
def test_an_answer_that_is_none_is_refused(benches: list[Bench], fault: str, sentence: str) -> None:
    benches.append(Bench(1, max_retries=0))
    with pytest.raises(FleetError) as caught:
        list(benches[0].start(slots(2, rollouts.fake(fault=fault))))
    assert sentence in str(caught.value)


def test_what_an_environment_prints_is_kept_to_its_end(bench: Bench) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        list(bench.start(slots(1, rollouts.fake(fault="flood_and_raise"))))
    assert "all work and no play" in caught.value.detail
    assert caught.value.detail.endswith("the last words")
    assert len(caught.value.detail) < 8000
    (child,) = bench.children()
    size = child.process._output.fileno
    assert eventually(lambda: os.fstat(size()).st_size <= 1 << 20)


def test_what_an_environment_printed_before_it_took_its_worker_along_is_shown(
    benches: list[Bench], monkeypatch: Any
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    benches.append(Bench(1, max_retries=0))
    with pytest.raises(FleetError) as caught:
        list(benches[0].start(slots(1, rollouts.fake(fault="print_and_die"))))
    assert "ended with exit code 7" in str(caught.value)
    assert "a word on stdout" in caught.value.detail


def test_printed_text_goes_to_standard_error_when_it_is_asked_for(
    benches: list[Bench], capfd: Any
) -> None:
    benches.append(Bench(1, show_output=True))
    list(benches[0].start(slots(1, rollouts.fake(fault="print"))))
    benches.pop().fleet.close()  # closing waits for the last output
    seen = capfd.readouterr()
    assert "a word past Python" in seen.err
    assert seen.out == ""


@contextlib.contextmanager
def in_front_of_the_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def test_a_worker_that_cannot_start_is_an_end_with_its_own_words(
    benches: list[Bench], tmp_path: Path
) -> None:
    (tmp_path / "gymnasium.py").write_text("raise ImportError('not on this machine')\n")
    with in_front_of_the_path(tmp_path):
        benches.append(Bench(2))
        with pytest.raises(
            FleetError, match=r"could not start \(ended with exit code 1\)"
        ) as caught:
            list(benches[0].start(slots(2)))
        assert "not on this machine" in caught.value.detail
        with pytest.raises(FleetError, match="could not start"):
            benches[0].fleet.probe()
        with pytest.raises(FleetError, match="could not start"):
            list(benches[0].start(slots(2)))


def test_a_worker_that_never_says_hello_is_an_end(benches: list[Bench], tmp_path: Path) -> None:
    (tmp_path / "gymnasium.py").write_text("import time; time.sleep(3600)\n")
    with in_front_of_the_path(tmp_path):
        benches.append(Bench(1))
        bench = benches[0]
        bench.wait_aside(bench.start(slots(1)))
        known: set[int] = set()
        for _ in range(3):
            assert eventually(lambda known=known: not known.issuperset(bench.fleet.list_pids()))
            known.update(bench.fleet.list_pids())
            bench.later()
        assert "could not start (did not start within 120 s)" in str(bench.outcome())
        assert len(known) == 3


def test_workers_killed_while_they_start_are_tried_more_often_but_not_for_ever(
    benches: list[Bench], tmp_path: Path
) -> None:
    note = tmp_path / "starts"
    (tmp_path / "gymnasium.py").write_text(
        "import os, signal\n"
        f"open({str(note)!r}, 'a').write('.')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with in_front_of_the_path(tmp_path):
        benches.append(Bench(1))
        with pytest.raises(FleetError, match=r"could not start \(killed by signal 9"):
            list(benches[0].start(slots(1)))
    assert 3 < len(note.read_text()) <= 12


def test_files_in_the_current_folder_are_not_mistaken_for_libraries(
    tmp_path: Path, monkeypatch: Any
) -> None:
    for name in ("gymnasium", "numpy", "queue"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a stranger')\n")
    monkeypatch.chdir(tmp_path)
    bench = Bench(1)
    with bench.fleet:
        assert len(list(bench.start(slots(1)))) == 1


PARENT = """
import sys, time
import rollouts
from rlflame.fleet.prestart import PrestartPool
from rlflame.fleet.local import LocalFleet
import dataclasses

if __name__ == "__main__":
    fleet = LocalFleet(2)
    task = rollouts.task(rollouts.fake(fault=sys.argv[1], marker=sys.argv[2]), rows=1)
    name = fleet.put(rollouts.weights(task.policy))
    fleet.probe()
    submission = fleet.submit([dataclasses.replace(task, policy_id=name)])
    if sys.argv[1]:
        while not any(child.position for child in fleet._pool.workers):
            time.sleep(0.01)
    else:
        list(submission)
    print(*fleet.list_pids(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("fault", ["", "hang", "wait"])
def test_children_of_a_killed_parent_end_by_themselves(fault: str, tmp_path: Path) -> None:
    """The workers are idle or in the middle of a step."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), fault, str(tmp_path / "gate")],
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(gone(pid) for pid in pids)
        parent.kill()
    assert eventually(lambda: all(gone(pid) for pid in pids), patience_s=10.0)


BUSY_PARENT = """
import dataclasses, sys, threading, time
from pathlib import Path
import rollouts
from rlflame.fleet.local import LocalFleet

if __name__ == "__main__":
    fault, marker, starter = sys.argv[1:]
    fleets = []
    if starter == "thread":
        thread = threading.Thread(target=lambda: fleets.append(LocalFleet(1)))
        thread.start()
        thread.join()
    else:
        fleets.append(LocalFleet(1))
    fleet = fleets[0]
    task = rollouts.task(rollouts.fake(fault=fault, marker=marker), rows=1)
    fleet.probe()
    submission = fleet.submit(
        [dataclasses.replace(task, policy_id=fleet.put(rollouts.weights(task.policy)))]
    )
    if fault in ("", "start_program", "fork_program"):
        list(submission)
    print(*fleet.list_pids(), flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def busy_parent(folder: Path, fault: str, starter: str = "main") -> Iterator[tuple[Any, int]]:
    """A process with one worker, and the worker's process id."""
    script = folder / "parent.py"
    script.write_text(BUSY_PARENT)
    words = [sys.executable, str(script), fault, str(folder / "gate"), starter]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        worker = 0
        try:
            assert parent.stdout is not None
            worker = int(parent.stdout.readline())
            yield parent, worker
        finally:
            parent.kill()
            with contextlib.suppress(ProcessLookupError):
                if worker:
                    os.killpg(worker, signal.SIGKILL)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux has the signal")


@linux_only
@pytest.mark.parametrize("starter", ["main", "thread"])
@pytest.mark.parametrize("fault", ["", "wait"])
def test_a_stopped_worker_ends_with_its_killed_parent(
    fault: str, starter: str, tmp_path: Path
) -> None:
    with busy_parent(tmp_path, fault, starter) as (parent, worker):
        os.kill(worker, signal.SIGSTOP)
        assert eventually(lambda: state_of(worker) == "T")
        parent.kill()
        assert eventually(lambda: gone(worker), patience_s=10.0)


@linux_only
def test_a_worker_that_holds_the_interpreter_lock_ends_with_its_killed_parent(
    tmp_path: Path,
) -> None:
    with busy_parent(tmp_path, "hang_in_c") as (parent, worker):
        assert eventually((tmp_path / "gate.here").exists)
        parent.kill()
        assert eventually(lambda: gone(worker), patience_s=10.0)


def group_of(pid: int) -> list[int]:
    """The processes in the group of this leader."""
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and is_in_group(int(folder.name), pid)
    ]


def is_in_group(pid: int, leader: int) -> bool:
    try:
        return os.getpgid(pid) == leader
    except ProcessLookupError:
        return False


@linux_only
@pytest.mark.parametrize("fault", ["start_program", "fork_program"])
def test_an_environment_s_program_ends_with_the_killed_parent_of_its_worker(
    fault: str, tmp_path: Path
) -> None:
    with busy_parent(tmp_path, fault) as (parent, worker):
        program = int((tmp_path / "gate").read_text())
        assert eventually(lambda: len(group_of(worker)) == 3)  # the third one watches the parent
        parent.kill()
        assert eventually(lambda: gone(worker) and gone(program), patience_s=10.0)


@linux_only
def test_a_worker_started_by_a_thread_outlives_the_thread(tmp_path: Path) -> None:
    """The kernel sends its signal when the thread that started the process ends."""
    with busy_parent(tmp_path, "", "thread") as (_, worker):
        assert not gone(worker)


@linux_only
def test_a_worker_whose_parent_died_before_it_could_ask_ends(tmp_path: Path) -> None:
    read, write = os.pipe()
    other = subprocess.Popen(["true"])
    other.wait()
    with subprocess.Popen(
        [sys.executable, "-m", "rlflame.rollout.process.worker_main", str(write), str(other.pid)],
        stdin=subprocess.PIPE,
        pass_fds=(write,),
        start_new_session=True,
    ) as worker:
        os.close(write)
        assert os.read(read, 1) == b""  # the worker sends no greeting
        assert worker.wait() == -signal.SIGKILL
    os.close(read)


def test_workers_that_cannot_even_be_made_leave_nothing_behind(monkeypatch: Any) -> None:
    made: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def scarce(*args: Any, **options: Any) -> Any:
        if len(made) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        made.append(real(*args, **options))
        return made[-1]

    before = descriptors() if Path("/proc/self/fd").exists() else 0
    monkeypatch.setattr("rlflame.rollout.process.worker_process.subprocess.Popen", scarce)
    with pytest.raises(FleetError, match=r"5 worker processes could not be started: .*temporarily"):
        LocalFleet(5)
    assert [process.poll() is None for process in made] == [False, False]
    if before:
        assert descriptors() == before


def test_an_observer_that_fails_is_heard_of_and_does_not_leave_anybody_waiting() -> None:
    def fragile(event: FleetEvent) -> None:
        if event.kind == "running":
            raise RuntimeError("the screen is gone")

    with LocalFleet(1, observer=fragile) as fleet:
        (task,) = slots(1)
        name = fleet.put(rollouts.weights(task.policy))
        submission = fleet.submit([dataclasses.replace(task, policy_id=name)])
        with pytest.raises(FleetError, match="the screen is gone"):
            list(submission)


def job(slot: int, **changes: Any) -> FleetJob:
    import queue

    task = rollouts.task(FAKE, slot=slot, **changes)
    return FleetJob(task, b"", b"", queue.SimpleQueue())


def test_a_slot_goes_back_to_the_worker_that_holds_its_environments() -> None:
    jobs, a, b = JobQueue(), object(), object()
    first = [job(slot) for slot in range(4)]
    jobs.add(first)
    taken = {who: [jobs.take(who).task.slot for _ in range(2)] for who in (a, b)}
    assert taken == {a: [0, 1], b: [2, 3]}
    jobs.add([job(slot) for slot in range(4)])
    assert [jobs.take(b).task.slot for _ in range(2)] == [2, 3]
    assert [jobs.take(a).task.slot for _ in range(2)] == [0, 1]


def test_an_idle_worker_takes_another_s_slot_rather_than_wait_but_nobody_s_first() -> None:
    jobs, a, b = JobQueue(), object(), object()
    jobs.add([job(0), job(1)])
    jobs.take(a), jobs.take(a)
    jobs.add([job(0), job(1), job(5), job(9, unit="episodes", purpose="evaluate")])
    assert [jobs.take(b).task.slot for _ in range(3)] == [5, 9, 1]
    jobs.forget_worker(a)
    jobs.add([job(1)])
    assert [jobs.take(b).task.slot for _ in range(2)] == [1, 0]
    assert not jobs


# A head start


def test_processes_that_began_early_become_workers_and_the_others_end(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    begun = rollouts.recorded_processes(monkeypatch, "rlflame.fleet.prestart")
    with PrestartPool() as early:
        assert len(early) == len(begun) == 2
        first = early.take(1)
        with LocalFleet(2, processes=first, environment="Hopper-v5") as fleet:
            assert first[0].pid in fleet.list_pids()
            assert len(set(fleet.list_pids())) == 2
            hellos = fleet.probe()
            assert hellos[0] == hellos[1]
            assert [process.has_exited for process in begun] == [False, False]
            early.close()
            assert [process.has_exited for process in begun] == [False, True]
    assert begun[0].has_exited
    with PrestartPool() as early:
        assert len(early) == 2
    assert all(process.has_exited for process in begun)


@pytest.mark.parametrize("words", [["train", "--bogus"], ["train", "--env", "nosuch"]])
def test_a_command_that_is_refused_leaves_none_of_them(words, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2), raising=False)
    monkeypatch.setattr("sys.argv", ["rlflame", *words])
    monkeypatch.setattr("rlflame.cli.app._exit_process", sys.exit)  # other tests have loaded gRPC
    begun = rollouts.recorded_processes(monkeypatch, "rlflame.fleet.prestart")
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    assert [process.has_exited for process in begun] == [True]


def test_ctrl_c_while_the_thread_begins_leaves_no_worker(monkeypatch):
    """The thread starts a new worker when one ends, which must not happen here."""
    begun = rollouts.recorded_processes(monkeypatch, "rlflame.fleet.worker_pool")
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name == "rlflame-fleet":
            assert thread._target.__self__._pool.all_greeted.wait(60.0)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LocalFleet(2)
    assert len(begun) == 2
    assert all(process.has_exited for process in begun)


def test_children_are_retired_only_when_the_thread_is_over(monkeypatch):
    held, seen = threading.Event(), []
    serve, dispose = LocalFleet._serve_until_closed, LocalFleet._dispose
    start = threading.Thread.start

    def slowly(self):
        serve(self)
        held.wait(60.0)

    def disposing(self):
        seen.append(self._thread_done.is_set())
        dispose(self)

    def interrupted(thread):
        start(thread)
        if thread.name == "rlflame-fleet":
            threading.Timer(0.2, held.set).start()
            raise KeyboardInterrupt

    monkeypatch.setattr(LocalFleet, "_serve_until_closed", slowly)
    monkeypatch.setattr(LocalFleet, "_dispose", disposing)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr("rlflame.fleet.local._INTERRUPT_WAIT_S", 60.0)
    with pytest.raises(KeyboardInterrupt):
        LocalFleet(1)
    assert seen == [True]


def test_a_thread_that_cannot_begin_is_a_sentence_and_not_waited_for(monkeypatch):
    def none_left(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    began = time.monotonic()
    monkeypatch.setattr("rlflame.fleet.local._INTERRUPT_WAIT_S", 60.0)
    with pytest.raises(FleetError, match="could not be started: can't start new thread"):
        LocalFleet(1)
    assert time.monotonic() - began < 60.0


def test_ctrl_c_before_the_thread_begins_is_not_waited_for_long(monkeypatch):
    def interrupted(thread):
        if thread.name == "rlflame-fleet":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr("rlflame.fleet.local._INTERRUPT_WAIT_S", 0.01)
    with pytest.raises(KeyboardInterrupt):
        LocalFleet(1)


@pytest.mark.parametrize(
    ("words", "rank", "begins"),
    [
        ([], None, True),
        (["--env", "hopper", "--workers", "2"], None, True),
        ([], "0", True),
        ([], "1", False),
        (["--set", "runtime.fleet=inline"], None, False),
        (["--fleet=flame"], None, False),
        *(([word], None, False) for word in sorted(early_module._EXCLUDING_OPTIONS)),
    ],
)
def test_they_begin_for_what_is_typed(words, rank, begins, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2), raising=False)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with PrestartPool.from_arguments(words) as early:
        assert len(early.take(9)) == begins


def test_what_they_must_not_begin_with_is_what_training_takes():
    """They are options that change what a worker receives, and all of them exist."""
    training = typer.main.get_command(app).commands["train"]
    options = {word for one in training.params for word in one.opts} | {"-h", "--help"}
    assert options >= early_module._EXCLUDING_OPTIONS
    assert {"--env-file", "--debug", "--config", "--set"} <= early_module._EXCLUDING_OPTIONS


def test_nobody_begins_early_where_there_is_one_processor_or_nobody_is_wanted(monkeypatch):
    with PrestartPool(0) as early:
        assert early.take(9) == []
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(1), raising=False)
    with PrestartPool() as early:
        assert early.take(9) == []


def test_an_environment_that_cannot_be_loaded_ahead_is_blamed_when_it_is_made():
    with LocalFleet(1, environment="no_such_module:Odd-v0") as fleet:
        assert len(fleet.probe()) == 1
