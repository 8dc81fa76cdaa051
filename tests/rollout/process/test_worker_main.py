"""A worker process and its messages: frames in, frames out, and a clean end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rollouts

from rlflame.rollout import wire
from rlflame.rollout.process.channel import MessageKind
from rlflame.rollout.process.parent_channel import BEAT_S
from rlflame.rollout.task import RolloutFailure

PATIENCE_S = 20.0


class Conversation:
    """The parent's side of the protocol: kind (1 byte), size (8 bytes), payload."""

    greeting: Any = None

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output"
        self._answers, write = os.pipe()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "rlflame.rollout.process.worker_main", str(write)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(write,),
                start_new_session=True,
            )
        os.close(write)

    def say(self, kind: int, value: Any) -> None:
        self.say_bytes(kind, wire.encode(value))

    def say_bytes(self, kind: int, payload: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack("<BQ", kind, len(payload)) + payload)
        self.process.stdin.flush()

    def hear(self, *, beats: bool = False) -> tuple[MessageKind, Any] | None:
        """The next frame, or None if the child has closed its side."""
        while True:
            head = self._read(9)
            if head is None:
                return None
            kind, length = struct.unpack("<BQ", head)
            payload = self._read(length)
            if kind != MessageKind.BEAT or beats:
                return MessageKind(kind), wire.decode(payload or b"")

    def is_heard_within(self, seconds: float) -> bool:
        return bool(select.select([self._answers], [], [], seconds)[0])

    def _read(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE_S)
            assert ready, f"silence; it had printed: {self.output.read_text()}"
            part = os.read(self._answers, count - len(data))
            if not part:
                return None
            data += part
        return data

    def give(self, task: Any) -> None:
        self.say(
            MessageKind.POLICY, {"id": task.policy_id, "arrays": rollouts.weights(task.policy)}
        )
        self.say(MessageKind.TASK, task)

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def stop_listening(self) -> None:
        os.close(self._answers)
        self._answers = -1

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):
            self.hang_up()
        if self._answers >= 0:
            os.close(self._answers)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: Any) -> Iterator[Conversation]:
    """A worker that many tests share, after its greeting."""
    conversation = Conversation(tmp_path_factory.mktemp("child"))
    conversation.greeting = conversation.hear()
    yield conversation
    conversation.end()


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Conversation]:
    """A worker for a test that ends it."""
    conversation = Conversation(tmp_path)
    conversation.greeting = conversation.hear()
    yield conversation
    conversation.end()


def eventually(happened: Callable[[], bool]) -> bool:
    """Poll a condition that has no notification, with a generous time limit."""
    until = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def gone(pid: int) -> bool:
    """Whether a process does not exist or is a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return False


def test_it_says_what_it_is_and_answers_tasks(lasting: Conversation) -> None:
    kind, hello = lasting.greeting
    assert kind is MessageKind.HELLO
    assert hello["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"core", "numpy", "gymnasium", "mujoco", "box2d", "libc"} <= hello.keys()
    task = rollouts.task(rollouts.fake(length=5))
    lasting.give(task)
    kind, fragment = lasting.hear()
    assert kind is MessageKind.RESULT
    assert wire.encode(fragment) == wire.encode(rollouts.run(task))
    following = rollouts.following(task, fragment)
    lasting.say(MessageKind.TASK, following)
    assert wire.encode(lasting.hear()[1]) == wire.encode(rollouts.run(following))


def test_an_environment_s_failure_is_an_answer_and_not_an_end(lasting: Conversation) -> None:
    for fault in ("raise", "exit", "shape"):
        lasting.give(rollouts.task(rollouts.fake(fault=fault), slot=6))
        kind, failure = lasting.hear()
        assert kind is MessageKind.RESULT
        assert isinstance(failure, RolloutFailure)
        assert (failure.slot, failure.step) == (6, 3)
    good = rollouts.task(rollouts.fake())
    lasting.say(MessageKind.TASK, good)
    assert wire.encode(lasting.hear()[1]) == wire.encode(rollouts.run(good))


def test_a_task_it_cannot_read_or_has_no_policy_for_is_answered_too(lasting: Conversation) -> None:
    task = rollouts.task(rollouts.fake(), policy_id="not sent yet")
    lasting.say(MessageKind.TASK, task)
    kind, message = lasting.hear()
    assert (kind, "KeyError" in message["traceback"]) == (MessageKind.BROKEN, True)
    lasting.say_bytes(MessageKind.TASK, wire.encode(task)[:-1])
    kind, message = lasting.hear()
    assert (kind, "WireError" in message["traceback"]) == (MessageKind.BROKEN, True)
    lasting.give(task)
    assert lasting.hear()[0] is MessageKind.RESULT


def test_a_forgotten_policy_is_unknown(lasting: Conversation) -> None:
    lasting.say(MessageKind.POLICY, {"id": "old", "arrays": {}})
    lasting.say(MessageKind.FORGET, {"id": "old"})
    lasting.say(MessageKind.FORGET, {"id": "never heard of"})
    lasting.say(MessageKind.TASK, rollouts.task(rollouts.fake(), policy_id="old"))
    kind, message = lasting.hear()
    assert kind is MessageKind.BROKEN
    assert "KeyError: 'old'" in message["traceback"]


def test_beats_tell_where_a_task_stands(lasting: Conversation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    task = rollouts.task(rollouts.fake(fault="wait", at=4, marker=str(gate)), rows=1)
    lasting.give(task)
    kind, where = lasting.hear(beats=True)
    while where["step"] < 4:
        kind, where = lasting.hear(beats=True)
    assert kind is MessageKind.BEAT
    assert where == {"slot": 0, "row": 0, "seed": task.states[0].seed, "step": 4}
    gate.touch()
    assert lasting.hear()[0] is MessageKind.RESULT


def test_a_position_is_told_once_in_each_task(lasting: Conversation, tmp_path: Path) -> None:
    """The second task waits at the same position as the first one."""
    for number in range(2):
        gate = tmp_path / f"gate {number}"
        lasting.give(rollouts.task(rollouts.fake(fault="wait", at=4, marker=str(gate)), rows=1))
        while lasting.hear(beats=True)[1]["step"] < 4:
            pass
        assert not lasting.is_heard_within(3.0 * BEAT_S)
        gate.touch()
        assert lasting.hear()[0] is MessageKind.RESULT


def test_what_an_environment_prints_never_gets_between_the_frames(lasting: Conversation) -> None:
    lasting.give(rollouts.task(rollouts.fake(fault="print")))
    assert lasting.hear()[0] is MessageKind.RESULT
    printed = lasting.output.read_text()
    for words in ("a word on stdout", "a word on stderr", "a word past Python"):
        assert words in printed


def test_it_ends_when_its_parent_hangs_up(child: Conversation) -> None:
    child.hang_up()
    assert child.hear() is None
    assert child.process.wait(PATIENCE_S) == 0
    assert child.output.read_text() == ""


def test_it_ends_when_a_frame_stops_half_way(child: Conversation) -> None:
    assert child.process.stdin is not None
    child.process.stdin.write(struct.pack("<BQ", MessageKind.TASK, 1000) + b"only so much")
    child.hang_up()
    assert child.process.wait(PATIENCE_S) == 0


def test_it_ends_in_the_middle_of_a_step_when_nobody_listens(
    child: Conversation, tmp_path: Path
) -> None:
    """The program that its environment had started ends too."""
    note = tmp_path / "program"
    child.give(rollouts.task(rollouts.fake(fault="start_program", marker=str(note)), rows=1))
    assert child.hear()[0] is MessageKind.RESULT
    program = int(note.read_text())
    child.give(rollouts.task(rollouts.fake(fault="hang"), slot=1, rows=1))
    while child.hear(beats=True)[1]["step"] < 3:
        continue
    child.stop_listening()
    child.process.wait(PATIENCE_S)
    assert eventually(lambda: gone(program))


def test_the_keyboard_s_interrupt_is_its_parent_s_business(lasting: Conversation) -> None:
    lasting.process.send_signal(signal.SIGINT)
    lasting.give(rollouts.task(rollouts.fake()))
    assert lasting.hear()[0] is MessageKind.RESULT


def test_its_environments_have_no_standard_input_to_read_tasks_from(lasting: Conversation) -> None:
    link = Path(f"/proc/{lasting.process.pid}/fd/0")
    if not link.exists():
        pytest.skip("no /proc on this system")
    assert os.readlink(link) == os.devnull


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the children of a process")
def test_an_environment_may_wait_for_all_of_its_programs():
    """A program that waits for the end of the worker is not the environment's."""
    code = """
import os, subprocess, threading
from rlflame.rollout.process.parent_channel import kill_group_with_process
kill_group_with_process()
(watching,) = (thread for thread in threading.enumerate() if thread.name == "rlflame-programs")
program = subprocess.Popen(["sleep", "600"])
watching.join()
program.kill()
try:
    while True:
        os.wait()
except ChildProcessError:
    print("all have ended", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.communicate(timeout=PATIENCE_S)[0] == b"all have ended\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
