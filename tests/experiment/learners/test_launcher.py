"""Learners of torchrun: identical results, and errors if one dies or hangs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import (
    ENDLESS_RUN,
    SHARDED_RUNS,
    SHARDS,
    TINY,
    TINY_SAC,
    finished,
    is_alive,
    rlflame,
    wait_until,
)

from rlflame.storage import checkpoint


def first_iteration(running: subprocess.Popen[str]) -> None:
    for line in running.stdout:
        if '"iteration"' in line:
            return
    raise AssertionError(f"no iteration: {running.stderr.read()}")


def digest(folder: Path) -> str:
    return checkpoint.load(folder / "latest.safetensors").digest


def logs(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("metrics.jsonl", "episodes.csv")]


#: The second process waits before it joins, and creates a file to show this.
STALLS = """
import os
if os.environ.get("RANK") == "1":
    import time
    from pathlib import Path
    Path(__file__).with_name("stalled").touch()
    time.sleep(600)
"""


def hung(rank: int, pid: int, size: int) -> str:
    return rf"^Learner {rank} of {size} \(process {pid}\) has not answered for 3 s \(runtime\."


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
    """As one group, and as two groups that meet at a port, like two machines."""
    words = ("train", *SHARDED_RUNS["ppo"], "--quiet")
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


#: The second learner stops, or hangs in its own computation.
HANGS = """
import os
if os.environ.get("RANK") == "1":
    import signal, time
    from pathlib import Path
    from rlflame.learning.ppo import loss
    def compute_shards(self, minibatch, count, networks, shards):
        Path(__file__).with_name("hung").write_text(str(os.getpid()))
        {}
    loss.NumpyPpo.compute_shards = compute_shards
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
    assert not is_alive(learner)
    # torchrun prints this when it has to kill a process, for which it waits half a minute.
    assert "forcefully" not in spoken.err


def test_ctrl_c_does_not_wait_for_a_learner_that_it_has_ended(tmp_path, monkeypatch):
    """The signal reaches the other learners too, while torch is still loading."""
    (tmp_path / "sitecustomize.py").write_text(STALLS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = ("train", *ENDLESS_RUN, "--json", "--out", tmp_path / "x")
    running = launched(*words, nproc_per_node="2", master_port=free_port())
    wait_until(lambda: (tmp_path / "stalled").exists() and (tmp_path / "x/config.toml").exists())
    running.send_signal(signal.SIGINT)
    spoken = finished(running, 100.0)
    said = spoken.events()[-1]
    assert (said["message"], said["exit_code"]) == ("Interrupted.", 130)
    assert "forcefully" not in spoken.err


def test_a_run_whose_torchrun_is_killed_saves_and_ends(tmp_path):
    words = ("train", *ENDLESS_RUN, "--json", "--out", tmp_path / "x")
    running = launched(*words, nproc_per_node="2", master_port=free_port())
    first_iteration(running)
    running.kill()
    spoken = finished(running, 100.0)  # the children hold its output open until they end
    assert re.search("^Stopped at step .* everything is saved", spoken.events()[-1]["message"])


@pytest.mark.parametrize("words", [("resume", "x"), ("train", *TINY, "--dry-run")])
def test_where_nothing_is_left_to_learn_torchrun_ends(words, tmp_path, monkeypatch):
    """The other processes do not wait for a first process that does not need them."""
    monkeypatch.chdir(tmp_path)
    assert rlflame("train", *SHARDED_RUNS["ppo"], "--out", "x").code == 0
    running = launched(*words, nproc_per_node="2", master_port=free_port())
    spoken = finished(running, 100.0)
    assert spoken.code == 0, spoken.err


PENDULUM = ("--env", "pendulum", "--algo", "sac", *TINY_SAC)


@pytest.mark.parametrize(
    ("words", "size", "useful", "hint"),
    [
        (TINY, 3, 2, "or add --set learning.gradient_shards=3 in a new run"),
        (TINY, 4, 2, "or add --set learning.gradient_shards=2 in a new run"),
        ((*TINY, "--set", "ppo.minibatch_size=2"), 64, 2, "start only 2"),
        ((*TINY, "--set", "ppo.minibatch_size=5"), 7, 2, "start only 2"),
        (PENDULUM, 2, 1, "or add --set learning.gradient_shards=2 in a new run"),
        ((*PENDULUM, "--set", "sac.critic_norm=batch"), 2, 1, "start only 1"),
    ],
)
def test_torchrun_learners_without_a_unit_of_work_are_refused(
    words, size, useful, hint, tmp_path, monkeypatch
):
    rank = {"RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in rank.items():
        monkeypatch.setenv(name, str(value))
    spoken = rlflame("train", *words, "--steps", "64", "--out", tmp_path / "x")
    assert spoken.code == 2
    assert f"torchrun has started {size} learners, but only {useful} can share" in spoken.err
    assert spoken.err.rstrip().endswith(hint)
    assert not (tmp_path / "x").exists()
