"""Kill a run's whole process tree at random moments, resume, until it is done; compare the files.

    python benchmarks/chaos.py --kills 50
    python benchmarks/chaos.py --kills 20 --env hopper --steps 40000 --workers 2
    python benchmarks/chaos.py --kills 20 --env pendulum --algo sac --steps 12800 \\
        --set rollout.steps=64 --set sac.buffer_size=6000 --set sac.updates_per_step=0.1

Prints whether digest, metrics.jsonl and episodes.csv equal those of a run that nobody touched.
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
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--env", default="cartpole")
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="of the moments, not of the run")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run")
    options = parser.parse_args()
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, killed = folder / "whole", folder / "killed"
        started = time.monotonic()
        subprocess.run(train(options, whole), check=True, stdout=subprocess.DEVNULL)
        length = time.monotonic() - started
        print(f"untouched: {length:.1f} s", flush=True)
        kills, resumes = 0, 0
        command = train(options, killed)
        while True:
            patience = None
            if kills < options.kills:
                # Several kills within the time that the whole run takes, some during start-up.
                patience = moments.uniform(0.3, max(3.0, length / 4))
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            try:
                _, said = process.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)
                process.communicate()
                kills += 1
            else:
                if process.returncode:
                    print(said)
                    return 1
                break
            if (killed / "latest.safetensors").exists():
                command = [sys.executable, "-m", "rlflame", "resume", str(killed), "--quiet",
                           "--set", "runtime.checkpoint_every_steps=1"]  # fmt: skip
                resumes += 1
            elif killed.exists():
                # Killed before its first checkpoint: nothing to resume, begin again.
                killed.rename(folder / f"stillborn-{kills}")
        print(f"killed {kills} times, resumed {resumes} times")
        return compare(whole, killed)


def train(options: argparse.Namespace, out: Path) -> list[str]:
    return [sys.executable, "-m", "rlflame", "train", "--local", "--env", options.env,
            "--algo", options.algo, "--steps", str(options.steps), "--out", str(out),
            "--workers", str(options.workers), "--quiet",
            *(["--set", f"rollout.staleness={options.staleness}"] if options.staleness else []),
            *(word for setting in options.set for word in ("--set", setting)),
            "--set", "runtime.checkpoint_every_steps=1",
            "--set", "evaluation.every_steps=5000", "--set", "evaluation.episodes=2"]  # fmt: skip


def kill_tree(root: int) -> None:
    """SIGKILL to a process and all its descendants, each by its id."""
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
    from rlflame import checkpoint

    digests = [checkpoint.load(run / "latest.safetensors").digest for run in (whole, killed)]
    verdicts = {"digest": digests[0] == digests[1]}
    for name in ("metrics.jsonl", "episodes.csv"):
        verdicts[name] = (whole / name).read_bytes() == (killed / name).read_bytes()
    for name, equal in verdicts.items():
        print(f"{name}: {'equal' if equal else 'DIFFERENT'}")
    print(digests[0])
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
