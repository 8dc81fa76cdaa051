"""Train SAC for a long time, and check the memory of its processes for leaks.

    python benchmarks/sac_soak.py                       # 100,000 steps of Hopper
    python benchmarks/sac_soak.py --steps 5000 --every 1000

The script prints resident megabytes during the run. The replay buffer is full after a tenth of the
run, so later growth is a leak. The script compares the median of the first and of the second half
of the rest, and exits with 1 if the second is more than `--allow` larger than the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from script import ended, positive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="hopper")
    parser.add_argument("--steps", type=positive, default=100_000)
    parser.add_argument("--every", type=int, default=2_000, help="steps between two readings")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--updates", type=float, default=0.25, help="updates per step")
    parser.add_argument("--allow", type=float, default=0.02, help="allowed growth, as a share")
    options = parser.parse_args()
    full = options.steps // 10
    with tempfile.TemporaryDirectory() as folder:
        looks = watched(options, full, Path(folder) / "run")
    settled = [megabytes for steps, megabytes in looks if steps >= full]
    if len(settled) < 4:
        print("too few readings: decrease --every or increase --steps")
        return 1
    middle = len(settled) // 2
    first, second = statistics.median(settled[:middle]), statistics.median(settled[middle:])
    print(f"median of the first half {first:.1f} MB, of the second {second:.1f} MB")
    return 0 if second <= first * (1.0 + options.allow) else 1


def watched(options: argparse.Namespace, full: int, out: Path) -> list[tuple[int, float]]:
    """Run the training and return (steps, resident megabytes) at regular intervals."""
    command = [sys.executable, "-m", "rlflame", "train", "--local", "--env", options.env,
               "--algo", "sac", "--steps", str(options.steps), "--out", str(out), "--json",
               "--workers", str(options.workers),
               "--set", f"sac.buffer_size={full}", "--set", f"sac.learning_starts={full // 2}",
               "--set", f"sac.updates_per_step={options.updates}",
               "--set", f"runtime.checkpoint_every_steps={max(1, full)}",
               # Evaluate before the memory is compared: evaluation environments stay in memory.
               "--set", f"evaluation.every_steps={max(1, full // 2)}"]  # fmt: skip
    looks: list[tuple[int, float]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            steps = event.get("steps", 0)
            if event["event"] == "iteration" and steps // options.every > len(looks):
                looks.append((steps, megabytes(process.pid)))
                print(f"{steps:>9} steps  {looks[-1][1]:8.1f} MB", flush=True)
    if process.returncode:
        raise SystemExit(f"the run ended with exit code {process.returncode}")
    return looks


def megabytes(root: int) -> float:
    """Return the resident megabytes of a process and all its descendants."""
    listed = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,rss="], capture_output=True, text=True, check=True
    ).stdout
    rows = [tuple(map(int, line.split())) for line in listed.splitlines()]
    tree = [root]
    for pid in tree:
        tree += [child for child, parent, _ in rows if parent == pid]
    return sum(kilobytes for pid, _, kilobytes in rows if pid in tree) / 1000.0


if __name__ == "__main__":
    ended(main)
