"""Commands as a user types them, in this process or in a new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from rlflame.cli.app import app
from rlflame.fleet.prestart import PrestartPool

#: Settings of PPO on CartPole with iterations of 64 steps, which take a few milliseconds.
TINY = tuple(
    word
    for setting in (
        "runtime.fleet=inline",
        "rollout.num_slots=2",
        "rollout.envs_per_slot=2",
        "rollout.steps=16",
        "ppo.epochs=2",
        "ppo.minibatch_size=32",
        "evaluation.every_steps=128",
        "evaluation.episodes=2",
        "evaluation.final_episodes=3",
        "evaluation.max_episode_steps=20",
    )
    for word in ("--set", setting)
)
#: The same for REINFORCE, with four episodes of at most 16 steps per iteration.
TINY_REINFORCE = tuple(
    word
    for setting in (
        "runtime.fleet=inline",
        "rollout.num_slots=2",
        "rollout.envs_per_slot=2",
        "rollout.steps=16",
        "evaluation.final_episodes=3",
        "evaluation.max_episode_steps=20",
    )
    for word in ("--set", setting)
)
#: The same for SAC on Pendulum: fifteen iterations of 16 steps, the first three with random
#: actions.
TINY_SAC = tuple(
    word
    for setting in (
        "runtime.fleet=inline",
        "rollout.num_slots=2",
        "rollout.envs_per_slot=2",
        "rollout.steps=4",
        "network.hidden=[16]",
        "stop_at_steps=240",
        "sac.learning_starts=48",
        "sac.batch_size=8",
        "evaluation.every_steps=128",
        "evaluation.episodes=2",
        "evaluation.final_episodes=3",
        "evaluation.max_episode_steps=20",
    )
    for word in ("--set", setting)
)


@dataclass(frozen=True)
class Spoken:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def json(self) -> Any:
        return json.loads(self.out)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def rlflame(*words: str | Path, early: PrestartPool | None = None) -> Spoken:
    """Run a command in this process, with the workers of `early` if there are any."""
    # A command sets variables that limit the threads of its process; restore them.
    with patch.dict(os.environ):
        result = CliRunner().invoke(app, [str(word) for word in words], obj=early)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Spoken(result.exit_code, result.stdout, result.stderr)


def process(*words: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a new process with its output in pipes."""
    environment = {**os.environ, **options.pop("environment", {})}
    command = [sys.executable, "-m", "rlflame", *map(str, words)]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=environment, text=True, **piped)


def finished(running: subprocess.Popen[str], timeout_s: float = 60.0) -> Spoken:
    """Wait for a process to end."""
    try:
        out, err = running.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        running.kill()
        raise
    return Spoken(running.returncode, out or "", err or "")


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(shown.stdout.strip()) and not shown.stdout.strip().startswith("Z")


def wait_until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Wait for a condition, with a time limit for slow machines."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition never became true"
        time.sleep(0.02)


#: Minibatches in four shards, so that eight learners can share PPO, and four the others.
SHARDS = ("--set", "learning.gradient_shards=4")
SHARDED_RUNS = {
    "ppo": (*TINY, *SHARDS, "--steps", "256"),
    "reinforce": ("--algo", "reinforce", *TINY_REINFORCE, *SHARDS, "--iterations", "3"),
    "sac": ("--algo", "sac", "--env", "pendulum", *TINY_SAC, *SHARDS),
}
ENDLESS_RUN = (*TINY, *SHARDS, "--set", "horizon_steps=9999999", "--steps", "9999999")
