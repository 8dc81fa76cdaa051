"""Learners as processes: equal bits, and what is left when one of them dies, hangs or fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from commands import TINY, TINY_REINFORCE, TINY_SAC, finished, process, rlflame

from rlflame.storage import checkpoint

SHARDS = ("--set", "learning.gradient_shards=4")
ALGORITHMS = {
    "ppo": (*TINY, *SHARDS, "--steps", "256"),
    "reinforce": ("--algo", "reinforce", *TINY_REINFORCE, *SHARDS, "--iterations", "3"),
    "sac": ("--algo", "sac", "--env", "pendulum", *TINY_SAC, *SHARDS),
}
ENDLESS = (*TINY, *SHARDS, "--set", "horizon_steps=9999999", "--steps", "9999999")


def running_learners(pid: int) -> list[int]:
    """The processes that a run has started to learn with it."""
    shown = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in shown.stdout.splitlines()]
    return [
        int(row[0])
        for row in rows
        if int(row[1]) == pid and "rlflame.experiment.learners.replica_main" in row[2]
    ]


def alive(pid: int) -> bool:
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(shown.stdout.strip()) and not shown.stdout.strip().startswith("Z")


def until(what, timeout_s: float = 120.0) -> None:
    """Wait for something to become true, for as long as it may take on a slow machine."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.02)


def first_iteration(running: subprocess.Popen[str]) -> None:
    for line in running.stdout:
        if '"iteration"' in line:
            return
    raise AssertionError(f"no iteration: {running.stderr.read()}")


def digest(folder: Path) -> str:
    return checkpoint.load(folder / "latest.safetensors").digest


def logs(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("metrics.jsonl", "episodes.csv")]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_processes_that_learn_together_end_in_the_bits_of_one(algorithm, tmp_path):
    words = ("train", *ALGORITHMS[algorithm], "--quiet")
    assert rlflame(*words, "--out", tmp_path / "1").code == 0
    for learners in (2, 4) if algorithm == "ppo" else (2,):
        out = tmp_path / str(learners)
        shared = ("--learners", str(learners), "--set", "runtime.compare_learners_every=1")
        spoken = finished(process(*words, *shared, "--out", out), 120.0)
        assert spoken.code == 0, spoken.err
        assert digest(out) == digest(tmp_path / "1")
        assert logs(out) == logs(tmp_path / "1")


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run without an end that two processes learn in, and the second of them."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    words = ("train", *ENDLESS, "--learners", "2", "--json", "--out", tmp_path / "x")
    running = process(*words, "--set", "runtime.learner_deadline_s=3")
    try:
        first_iteration(running)
        (learner,) = running_learners(running.pid)
        yield running, learner
    finally:
        running.kill()


def assert_ended(spoken, message: str, folder: Path) -> None:
    error = spoken.events()[-1]
    assert (spoken.code, error["event"]) == (1, "error")
    assert re.search(message, error["message"]), error
    kept = folder / error["hint"].removeprefix(f"rlflame resume {folder} continues from ")
    assert checkpoint.load(kept).digest == digest(folder)


def test_a_learner_that_is_killed_ends_the_run_and_another_number_goes_on(begun, tmp_path):
    running, learner = begun
    os.kill(learner, signal.SIGKILL)
    spoken = finished(running, 120.0)
    message = rf"^Learner 1 of 2 \(process {learner}\) was lost: it was killed by signal 9"
    assert_ended(spoken, message, tmp_path / "x")
    assert not alive(learner)

    goal = ("--steps", "256", "--json")
    resumed = rlflame("resume", tmp_path / "x", "--learners", "1", *goal).events()[-1]
    words = ("train", *ENDLESS[:-2], *goal, "--out", tmp_path / "y")
    assert resumed["state_digest"] == rlflame(*words).events()[-1]["state_digest"]
    assert logs(tmp_path / "x") == logs(tmp_path / "y")


def hung(rank: int, pid: int, size: int) -> str:
    return rf"^Learner {rank} of {size} \(process {pid}\) has not answered for 3 s \(runtime\."


def test_a_learner_that_hangs_ends_the_run_and_is_taken_along(begun, tmp_path):
    running, learner = begun
    os.kill(learner, signal.SIGSTOP)
    spoken = finished(running, 120.0)
    assert_ended(spoken, hung(1, learner, 2), tmp_path / "x")
    assert not alive(learner)
    assert checkpoint.load(tmp_path / "x/latest.safetensors").progress.steps == 0


#: Learner 2 is stopped when it has come to an exchange, and has given nothing yet.
STOPS = """
import sys
if "rlflame.experiment.learners.replica_main" in sys.orig_argv:
    import os, signal
    from torch import distributed
    from pathlib import Path
    whole, calls = distributed.all_gather, []
    def all_gather(*words, **options):
        calls.append(words)
        if len(calls) == 20 and distributed.get_rank() == 2:
            Path(__file__).with_name("stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return whole(*words, **options)
    distributed.all_gather = all_gather
"""


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """Starts a run of four learners, of which one stops in the middle of an exchange."""
    (tmp_path / "sitecustomize.py").write_text(STOPS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = ("train", *ENDLESS, "--learners", "4", "--json", "--out", tmp_path / "x")
    with contextlib.ExitStack() as leave:

        def start(deadline_s: int) -> tuple[subprocess.Popen[str], list[int], int]:
            running = process(*words, "--set", f"runtime.learner_deadline_s={deadline_s}")
            leave.callback(running.kill)
            until((tmp_path / "stopped").exists)
            learners = running_learners(running.pid)
            assert len(learners) == 3
            until(lambda: (tmp_path / "stopped").read_text())
            return running, learners, int((tmp_path / "stopped").read_text())

        yield start


def test_a_learner_that_stops_in_the_middle_of_an_exchange_is_named(stopped, tmp_path):
    """The other three wait in the same exchange, and are well."""
    running, learners, pid = stopped(3)
    spoken = finished(running, 120.0)
    assert_ended(spoken, hung(2, pid, 4), tmp_path / "x")
    assert not any(map(alive, learners))


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP])
def test_the_second_signal_ends_a_run_that_waits_for_a_learner(stopped, first):
    """At once, and not when its deadline of ten minutes is over."""
    running, learners, _ = stopped(600)
    running.send_signal(first)
    time.sleep(0.3)  # signals of one kind are one until they are delivered
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) in (130, -signal.SIGINT)
    if sys.platform == "linux":  # elsewhere a process that is stopped stays until it goes on
        until(lambda: not any(map(alive, learners)))


#: A learner that never gets as far as joining; it says so by a file.
STALLS = """
import sys
if "rlflame.experiment.learners.replica_main" in sys.orig_argv:
    import time
    from pathlib import Path
    Path(__file__).with_name("stalled").touch()
    time.sleep(600)
"""


#: The same of what torchrun has started.
IN_TORCHRUN = (
    '"rlflame.experiment.learners.replica_main" in sys.orig_argv',
    '__import__("os").environ.get("RANK") == "1"',
)


@pytest.fixture
def stalled(tmp_path, monkeypatch):
    """A run that waits for its second learner, and that learner."""
    (tmp_path / "sitecustomize.py").write_text(STALLS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    running = process("train", *ENDLESS, "--learners", "2", "--json", "--out", tmp_path / "x")
    try:
        until((tmp_path / "stalled").exists)
        (learner,) = running_learners(running.pid)
        yield running, learner
        if alive(learner):
            os.kill(learner, signal.SIGKILL)
    finally:
        running.kill()


def test_a_learner_that_dies_before_it_has_joined_ends_the_run(stalled, tmp_path):
    running, learner = stalled
    os.kill(learner, signal.SIGKILL)
    # Torch itself would wait three minutes for it.
    spoken = finished(running, 100.0)
    assert spoken.code == 1
    said = " ".join(spoken.events()[-1]["message"].split())
    assert said.startswith(
        f"Learner 1 of 2 (process {learner}) was lost: it was killed by signal 9"
    )


def test_whoever_waits_for_learners_can_be_ended(stalled):
    running, _ = stalled
    running.send_signal(signal.SIGTERM)
    running.send_signal(signal.SIGINT)  # one that saves, and one that means it
    running.wait(timeout=100)


def test_no_learner_and_no_file_outlives_the_first(begun, tmp_path):
    running, learner = begun
    running.kill()
    running.wait()
    until(lambda: not alive(learner))
    assert not any((tmp_path / "temporary").iterdir())


#: Python runs this when it starts; no learner can make or join a store that has a port.
PORTLESS = """
import sys
if "--learners" in sys.orig_argv or "rlflame.experiment.learners.replica_main" in sys.orig_argv:
    from rlflame.experiment.learners import liveness as roll_call
    def refuse(*_, **__):
        raise ZeroDivisionError("a store at a port")
    roll_call.TCPStore = refuse
"""


def test_learners_of_one_command_meet_at_no_port(tmp_path, monkeypatch):
    """Any user of the machine can connect to one, and read and set its keys."""
    (tmp_path / "sitecustomize.py").write_text(PORTLESS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = (*TINY, *SHARDS, "--steps", "64", "--learners", "2", "--out", tmp_path / "x")
    assert finished(process("train", *words), 120.0).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_all_learners_hear_saves_and_ends_them(number, begun, tmp_path):
    """As from a terminal, by Ctrl-C or in going away: the first decides when it is over."""
    running, learner = begun
    os.kill(learner, number)
    running.send_signal(number)
    spoken = finished(running, 120.0)
    assert spoken.code == 128 + number
    assert not alive(learner)
    assert checkpoint.load(tmp_path / "x/latest.safetensors").progress.steps > 0


#: Python runs this when it starts; only a learner that is not the first is broken by it.
BREAKS = """
import sys
if "rlflame.experiment.learners.replica_main" in sys.orig_argv:
    from rlflame.learning.ppo import ppo
    def gradient(self, batch, count):
        raise ZeroDivisionError("the second learner's own")
    ppo.NumpyPpo.compute_gradient = gradient
"""


def test_the_traceback_of_a_learner_reaches_the_user(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    out = tmp_path / "x"
    words = ("train", *TINY, *SHARDS, "--steps", "256", "--learners", "2", "--out", out)
    spoken = finished(process(*words), 120.0)
    assert spoken.code == 1
    said = " ".join(spoken.err.split())
    assert re.search(r"Learner 1 of 2 \(process \d+\) was lost: it ended with exit code 1\.", said)
    assert "ZeroDivisionError: the second learner's own" in spoken.err
    assert checkpoint.load(out / "latest.safetensors").progress.steps == 0


def test_a_learner_that_does_not_come_to_an_exchange_is_named(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        BREAKS.replace("raise ZeroDivisionError", "import time; time.sleep(600); print")
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = ("train", *TINY, *SHARDS, "--steps", "256", "--learners", "2", "--out", tmp_path / "x")
    running = process(*words, "--set", "runtime.learner_deadline_s=3")
    spoken = finished(running, 120.0)
    assert spoken.code == 1
    said = " ".join(spoken.err.split())
    assert re.search(r"Learner 1 of 2 \(process \d+\) has not answered for 3 s", said)


# torchrun


def launched(*words: str | Path, **launcher: str) -> subprocess.Popen[str]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in launcher.items()]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *options,
            "-m",
            "rlflame",
            *map(str, words),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def test_processes_that_torchrun_starts_learn_as_one(tmp_path):
    """As one group, and as two groups that meet at a port, as two machines would."""
    words = ("train", *ALGORITHMS["ppo"], "--quiet")
    assert rlflame(*words, "--out", tmp_path / "1").code == 0

    running = launched(*words, "--out", tmp_path / "2", nproc_per_node="2", master_port=free_port())
    spoken = finished(running, 180.0)
    assert spoken.code == 0, spoken.err
    assert spoken.out.splitlines() == [str(tmp_path / "2")]

    meeting = {"nnodes": "2", "nproc_per_node": "1", "master_addr": "127.0.0.1"}
    meeting["master_port"] = free_port()
    groups = [launched(*words, "--out", tmp_path / "3", node_rank=n, **meeting) for n in "01"]
    first, second = (finished(group, 180.0) for group in groups)
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert (first.out.splitlines(), second.out) == ([str(tmp_path / "3")], "")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]
    assert digest(tmp_path / "1") == digest(tmp_path / "2") == digest(tmp_path / "3")


#: The second learner stops, or never returns from its own arithmetic.
HANGS = """
import os
if os.environ.get("RANK") == "1":
    import signal, time
    from pathlib import Path
    from rlflame.learning.ppo import ppo
    def gradient(self, batch, count):
        Path(__file__).with_name("hung").write_text(str(os.getpid()))
        {}
    ppo.NumpyPpo.compute_gradient = gradient
"""


@pytest.mark.parametrize("hang", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(600)"])
def test_a_learner_of_torchrun_that_hangs_is_named_and_nobody_waits_for_it(
    hang, tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(HANGS.format(hang))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = ("train", *TINY, *SHARDS, "--steps", "256", "--json", "--out", tmp_path / "x")
    late = ("--set", "runtime.learner_deadline_s=3")
    running = launched(*words, *late, nproc_per_node="2", master_port=free_port())
    spoken = finished(running, 120.0)
    learner = int((tmp_path / "hung").read_text())
    assert re.search(hung(1, learner, 2), spoken.events()[-1]["message"])
    assert not alive(learner)
    # What torchrun says where it had to kill a process, for which it waits half a minute.
    assert "forcefully" not in spoken.err


def test_ctrl_c_does_not_wait_for_a_learner_that_it_has_ended(tmp_path, monkeypatch):
    """It reaches the others too, while torch still loads."""
    (tmp_path / "sitecustomize.py").write_text(STALLS.replace(*IN_TORCHRUN))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = ("train", *ENDLESS, "--json", "--out", tmp_path / "x")
    running = launched(*words, nproc_per_node="2", master_port=free_port())
    until(lambda: (tmp_path / "stalled").exists() and (tmp_path / "x/config.toml").exists())
    running.send_signal(signal.SIGINT)
    spoken = finished(running, 100.0)
    said = spoken.events()[-1]
    assert (said["message"], said["exit_code"]) == ("Interrupted.", 130)
    assert "forcefully" not in spoken.err


def test_a_run_whose_torchrun_is_killed_saves_and_ends(tmp_path):
    words = ("train", *ENDLESS, "--json", "--out", tmp_path / "x")
    running = launched(*words, nproc_per_node="2", master_port=free_port())
    first_iteration(running)
    running.kill()
    spoken = finished(running, 100.0)  # what it has started holds its streams open until it ends
    assert re.search("^Stopped at step .* everything is saved", spoken.events()[-1]["message"])


@pytest.mark.parametrize("words", [("resume", "x"), ("train", *TINY, "--dry-run")])
def test_where_nothing_is_left_to_learn_torchrun_ends(words, tmp_path, monkeypatch):
    """Nobody waits for a first process that has no need of the others."""
    monkeypatch.chdir(tmp_path)
    assert rlflame("train", *ALGORITHMS["ppo"], "--out", "x").code == 0
    running = launched(*words, nproc_per_node="2", master_port=free_port())
    spoken = finished(running, 100.0)
    assert spoken.code == 0, spoken.err


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--learners", "3"),
            """
            3 learners cannot share 8 shards evenly.
            hint: --learners 2, or in a new run --set learning.gradient_shards=9""",
        ),
        (
            ("--learners", "2", "--set", "gradient_shards=1"),
            """
            2 learners cannot share 1 shard evenly.
            hint: --learners 1, or in a new run --set learning.gradient_shards=8""",
        ),
        (
            ("--learners", "64", "--set", "gradient_shards=64"),
            """
            learning: 32 samples cannot be cut into 64 parts: set gradient_shards to 32 or less, or
            learn from more samples at once.
            hint: rlflame config lists all""",
        ),
    ],
)
def test_learners_that_cannot_share_are_refused_with_what_to_type(words, message, tmp_path):
    spoken = rlflame("train", *TINY, "--steps", "64", *words, "--out", tmp_path / "x")
    assert spoken.code == 2
    said = " ".join(spoken.err.split())
    assert " ".join(textwrap.dedent(message).split()) in said
    assert not (tmp_path / "x").exists()


def test_critics_that_need_a_batch_whole_are_learned_by_one_learner(tmp_path):
    words = ("--algo", "sac", "--set", "sac.critic_norm=batch", "--learners", "2")
    spoken = rlflame("train", "--env", "pendulum", *words, "--out", tmp_path / "x")
    assert spoken.code == 2
    assert (
        "learning: critics standardised over the batch need it whole, not in 8 parts: set "
        "gradient_shards to 1, and learn with one learner."
    ) in " ".join(spoken.err.split())
    assert not (tmp_path / "x").exists()


def test_a_run_that_needs_batches_whole_is_not_told_of_a_new_run_that_could_share(tmp_path):
    words = ("--algo", "sac", "--set", "sac.critic_norm=batch", "--steps", "200")
    assert rlflame("train", "--env", "pendulum", *words, "--out", tmp_path / "x").code == 0
    spoken = rlflame("resume", tmp_path / "x", "--steps", "400", "--learners", "2")
    assert spoken.code == 2
    said = " ".join(spoken.err.split())
    assert "2 learners cannot share 1 shard evenly" in said
    assert "--learners 1" in said
    assert "gradient_shards" not in said
