"""Kill and resume a run at random moments, and compare it with an unkilled run.

    python benchmarks/chaos.py --kills 50
    python benchmarks/chaos.py --kills 20 --env hopper --steps 40000 --workers 2
    python benchmarks/chaos.py --kills 20 --env pendulum --algo sac --steps 40960 \\
        --set rollout.steps=64 --set sac.buffer_size=6000 --set sac.updates_per_step=0.1 \\
        --set network.hidden=[32,32] --set sac.batch_size=32

Each kill sends SIGKILL to all processes of the run. One kill in three comes while the processes
start. The other kills come shortly after a random number of checkpoints. If the run has a replay
buffer, one kill in three comes while a replay file is being written. The script prints the number
of kills of each kind, and whether the digest, metrics.jsonl and episodes.csv are identical to those
of a run that was never killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from script import ended, positive

#: The share of the run during which the kills happen. The rest of the run is not disturbed.
SHARE = 0.8
POLL_S = 0.0005


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=positive, default=50)
    parser.add_argument("--env", default="cartpole")
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("--steps", type=positive, default=40_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills, not of the run")
    parser.add_argument("--set", action="append", default=[], help="a setting for rlflame train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, killed = folder / "whole", folder / "killed"
        started = time.monotonic()
        subprocess.run(train(options, whole), check=True, stdout=subprocess.DEVNULL)
        iterations = last(whole)
        print(
            f"reference run: {time.monotonic() - started:.1f} s, {iterations} iterations",
            flush=True,
        )
        kinds = ["start", "checkpoint", "segment" if (whole / "replay").exists() else "checkpoint"]
        most = max(1, round(2 * SHARE * iterations / options.kills))
        came, code = harassed(options, killed, Moments(kinds, most, options.seed))
        if code:
            return code
        print(f"killed {sum(came.values())} times: {dict(came)}")
        if sum(came.values()) < options.kills:
            print("the run finished before all kills: increase --steps")
            return 1
        return compare(whole, killed)


class Moments:
    """Choose the moments of the kills."""

    def __init__(self, kinds: list[str], most: int, seed: int) -> None:
        self._kinds, self._most = kinds, most
        self._random = random.Random(seed)

    def wait(self, kill: int, folder: Path, process: subprocess.Popen[str]) -> str:
        """Wait for the moment of the next kill.

        Returns the kind of the kill, or an empty string if the process ends before the moment.
        """
        kind = self._kinds[kill % len(self._kinds)] if folder.exists() else "checkpoint"
        if kind == "start":
            reached, after = (lambda: True), self._random.uniform(0.0, 3.0)
        elif kind == "segment":
            before = set(folder.glob("replay/.*"))
            reached, after = (lambda: not before.issuperset(folder.glob("replay/.*"))), 0.0
        else:
            beyond = last(folder) + self._random.randint(1, self._most)
            reached, after = (lambda: last(folder) >= beyond), self._random.uniform(0.0, 0.2)
        while not reached():
            if process.poll() is not None:
                return ""
            time.sleep(POLL_S)
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            return kind
        return ""


def last(folder: Path) -> int:
    """Count the iterations in timing.jsonl, including those that a resume discards."""
    with contextlib.suppress(FileNotFoundError):
        record = (folder / "timing.jsonl").read_bytes()
        return record.count(b"\n") - record.count(b'"closing"')
    return 0


def harassed(
    options: argparse.Namespace, folder: Path, moments: Moments
) -> tuple[Counter[str], int]:
    """Kill and resume a run until it ends. Return the kills and the exit code."""
    came: Counter[str] = Counter()
    command = train(options, folder)
    while True:
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            kills = sum(came.values())
            kind = moments.wait(kills, folder, process) if kills < options.kills else ""
            if kind:
                kill_tree(process.pid)
            _, said = process.communicate()
        if not kind:
            if process.returncode:
                print(said)
            return came, process.returncode
        if not (folder / "latest.safetensors").exists():
            # The run has no checkpoint to resume from, so start it again.
            folder.rename(folder.with_name(f"stillborn-{time.monotonic_ns()}"))
            continue
        came[kind] += 1
        command = [sys.executable, "-m", "rlflame", "resume", str(folder), "--quiet",
                   "--set", "runtime.checkpoint_every_steps=1"]  # fmt: skip


def train(options: argparse.Namespace, out: Path) -> list[str]:
    return [sys.executable, "-m", "rlflame", "train", "--local", "--env", options.env,
            "--algo", options.algo, "--steps", str(options.steps), "--out", str(out),
            "--workers", str(options.workers), "--quiet",
            *(["--set", f"rollout.staleness={options.staleness}"] if options.staleness else []),
            *(word for setting in options.set for word in ("--set", setting)),
            "--set", "runtime.checkpoint_every_steps=1",
            "--set", "evaluation.every_steps=5000", "--set", "evaluation.episodes=2"]  # fmt: skip


def kill_tree(root: int) -> None:
    """Send SIGKILL to a process and all its descendants."""
    listed = subprocess.run(
        ["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {int(pid): int(parent) for pid, parent in map(str.split, listed.splitlines())}
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def compare(whole: Path, killed: Path) -> int:
    from rlflame.storage import checkpoint

    digests = [checkpoint.load(run / "latest.safetensors").digest for run in (whole, killed)]
    verdicts = {"digest": digests[0] == digests[1]}
    for name in ("metrics.jsonl", "episodes.csv"):
        verdicts[name] = (whole / name).read_bytes() == (killed / name).read_bytes()
    for name, equal in verdicts.items():
        print(f"{name}: {'equal' if equal else 'DIFFERENT'}")
    print(digests[0])
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    ended(main)
