"""Time the start of `rlflame train`, from Enter to the first rollout.

    python benchmarks/start.py --repeat 5 --csv docs/results/start.csv

Each start runs `rlflame train --local --json`, waits for the first `iteration` event and stops the
run. The first start is a warm-up and is not counted. The event comes after the first update, so the
script subtracts the time of learning, which it reads from the run's timing.jsonl. On Linux, the
script also checks whether a process of the run has loaded a library of torch.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from script import ended, positive, table

COLUMNS = ["env", "start", "processor", "at_work", "first_rollout_s", "first_iteration_s", "torch"]
#: The time that a run has for saving its state and ending.
END_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="hopper", help="environments, separated by commas")
    parser.add_argument("--repeat", type=positive, default=5)
    parser.add_argument("--csv", type=table, help="CSV file, overwritten at the end")
    options = parser.parse_args()
    from idle import others, processor

    # With bytecode files, modules are compiled once and not at every start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    rows = []
    for env in options.env.split(","):
        started(env)
        times = []
        for number in range(options.repeat):
            row = {"env": env, "start": number, "processor": processor(), "at_work": others(),
                   **started(env)}  # fmt: skip
            times.append(row["first_rollout_s"])
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            rows.append(row)
        print(f"{env}: {statistics.median(times):.2f} s from Enter to the first rollout, "
              f"median of {len(times)}, {min(times):.2f} to {max(times):.2f}")  # fmt: skip
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


def started(env: str) -> dict[str, Any]:
    """Start a run and stop it after its first iteration."""
    from ppo_vs_sb3 import family

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "rlflame", "train", "--env", env, "--local", "--json",
                   "--out", str(out)]  # fmt: skip
        begun = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            if not any(json.loads(line)["event"] == "iteration" for line in process.stdout):
                errors.seek(0)
                raise SystemExit(f"{' '.join(command)} ran no iteration:\n{errors.read()}")
            iteration_s = time.monotonic() - begun
            loaded = {has_torch(pid) for pid in family(process.pid)}
        finally:
            end(process)
        first = json.loads((out / "timing.jsonl").read_text().splitlines()[0])
    torch = "yes" if True in loaded else "" if None in loaded else "no"
    return {"first_rollout_s": round(iteration_s - first["learn_s"], 3),
            "first_iteration_s": round(iteration_s, 3), "torch": torch}  # fmt: skip


def end(process: subprocess.Popen[str]) -> None:
    """Interrupt the process, and kill it if it does not end."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def has_torch(pid: int) -> bool | None:
    """Check whether a process has loaded torch; None if the system does not show it."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except FileNotFoundError:
        return None if not Path("/proc/self/maps").exists() else False
    except OSError:
        return False


if __name__ == "__main__":
    ended(main)
