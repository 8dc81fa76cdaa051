"""Times the start of `rlflame train`, from Enter to the first rollout.

    python benchmarks/start.py --repeat 5 --csv docs/results/start.csv

Each start runs the command with an environment, --local and --json, waits for the first `iteration`
event and stops the run. A warm-up start does not count. The event comes after the update, so the
seconds of learning, read from the run's own record, are subtracted. On Linux, the script also
checks whether a process of the run has loaded a library of torch.
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
#: For a run to save what it has and end.
END_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="hopper", help="one or several, with commas")
    parser.add_argument("--repeat", type=positive, default=5)
    parser.add_argument("--csv", type=table, help="overwritten, at the end")
    options = parser.parse_args()
    from idle import others, processor

    # A fresh clone compiles its modules once, not at every start.
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
    """One start, stopped when its first iteration is over."""
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
                raise SystemExit(f"{' '.join(command)} had no iteration:\n{errors.read()}")
            iteration_s = time.monotonic() - begun
            loaded = {has_torch(pid) for pid in family(process.pid)}
        finally:
            end(process)
        first = json.loads((out / "timing.jsonl").read_text().splitlines()[0])
    torch = "yes" if True in loaded else "" if None in loaded else "no"
    return {"first_rollout_s": round(iteration_s - first["learn_s"], 3),
            "first_iteration_s": round(iteration_s, 3), "torch": torch}  # fmt: skip


def end(process: subprocess.Popen[str]) -> None:
    """Ask it to, and after a while make it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def has_torch(pid: int) -> bool | None:
    """None where that cannot be seen."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except FileNotFoundError:
        return None if not Path("/proc/self/maps").exists() else False
    except OSError:
        return False


if __name__ == "__main__":
    ended(main)
