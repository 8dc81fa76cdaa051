"""Seconds from Enter to the first rollout of `rlflame train`.

    python benchmarks/start.py --repeat 5 --csv docs/results/start.csv

Starts the command, with nothing but an environment and --json, as often as --repeat says and once
more before, which does not count; waits until the first iteration is told, and stops it. That is
told once it has been learned from, so the seconds of learning, which the run itself writes down,
are taken off: what is left is until all the first iteration's fragments were here. Also looks
whether any of the run's processes has loaded a library of torch, on Linux.
"""

from __future__ import annotations

import argparse
import csv
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COLUMNS = ["env", "start", "at_work", "first_rollout_s", "first_iteration_s", "torch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="hopper", help="one or several, with commas")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = []
    for env in options.env.split(","):
        started(env)
        found = [{"env": env, "start": number, **started(env)} for number in range(options.repeat)]
        times = sorted(float(row["first_rollout_s"]) for row in found)
        loaded = sum(row["torch"] for row in found)
        print(f"{env}: {statistics.median(times):.2f} s from Enter to the first rollout (median of "
              f"{len(times)}, {times[0]:.2f} to {times[-1]:.2f}); torch loaded in {loaded} of them",
              flush=True)  # fmt: skip
        rows += found
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


def started(env: str) -> dict[str, Any]:
    """One start, stopped when its first iteration is over."""
    from idle import others
    from ppo_vs_sb3 import family

    at_work = others()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "rlflame", "train", "--env", env, "--local", "--json"]
        begun = time.monotonic()
        with subprocess.Popen(
            [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if json.loads(line)["event"] == "iteration":
                    break
            else:
                raise SystemExit(f"{' '.join(command)} ended without an iteration")
            iteration_s = time.monotonic() - begun
            torch = any(has_torch(pid) for pid in family(process.pid))
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        first = json.loads((out / "timing.jsonl").read_text().splitlines()[0])
    return {"at_work": at_work, "first_rollout_s": round(iteration_s - first["learn_s"], 3),
            "first_iteration_s": round(iteration_s, 3), "torch": torch}  # fmt: skip


def has_torch(pid: int) -> bool:
    maps = Path(f"/proc/{pid}/maps")
    return maps.exists() and "libtorch" in maps.read_text()


if __name__ == "__main__":
    main()
