"""Time whole training runs with the compiled kernels and with numpy alone, pair by pair.

    python benchmarks/kernels.py --csv docs/results/kernels.csv
    python benchmarks/kernels.py --run hopper,ppo,1000000 --pairs 5

Each pair trains the same recipe twice, in alternating order, and compares the trained weights. The
times of collecting, learning and the whole run come from the run's timing.jsonl and include no
start-up.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from idle import others, processor
from script import ended, positive, table

from rlflame.learning.kernels.library import VARIABLE, is_missing
from rlflame.storage.checkpoint import compute_state_digest, load

RUNS = (
    "hopper,ppo,300000",
    "halfcheetah,ppo,300000",
    "cartpole,ppo,100000",
    "halfcheetah,sac,13000",
)
COLUMNS = ["env", "algo", "steps", "pair", "kernels", "seconds", "collect_seconds",
           "learn_seconds", "processor", "others_before"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", metavar="ENV,ALGO,STEPS")
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--csv", type=table, help="CSV file, overwritten")
    options = parser.parse_args()
    if is_missing():
        parser.error("rlflame was installed without the compiled kernels")
    rows = []
    print("environment   algorithm   seconds with numpy   with kernels   ratio   learning ratio")
    for run in options.run or RUNS:
        env, algo, steps = run.split(",")
        ratios = []
        times: dict[str, list[float]] = {"off": [], "on": []}
        for pair in range(options.pairs):
            found, weights = {}, set()
            for kernels in ("off", "on") if pair % 2 else ("on", "off"):
                note = others()
                found[kernels], digest = train(env, algo, steps, kernels)
                weights.add(digest)
                times[kernels].append(found[kernels]["seconds"])
                rows.append([env, algo, steps, pair, kernels,
                             *(f"{seconds:.3f}" for seconds in found[kernels].values()),
                             processor(), note])  # fmt: skip
            if len(weights) != 1:
                sys.exit(f"{run}: the trained weights differ")
            ratios.append([found["off"][name] / found["on"][name]
                           for name in ("seconds", "learn_seconds")])  # fmt: skip
        whole, learning = (median(values) for values in zip(*ratios, strict=True))
        print(f"{env:13s} {algo:11s} {median(times['off']):18.2f} {median(times['on']):14.2f} "
              f"{whole:7.2f} {learning:16.2f}", flush=True)  # fmt: skip
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def train(env: str, algo: str, steps: str, kernels: str) -> tuple[dict[str, float], str]:
    """Train without evaluations; return the times and a digest of the trained weights."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "rlflame", "train", "--env", env, "--algo", algo,
                   "--steps", steps, "--out", str(out), "-q",
                   "--set", f"evaluation.every_steps={10 * int(steps)}",
                   "--set", "evaluation.final_episodes=1"]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True,
                       env={**os.environ, VARIABLE: kernels})  # fmt: skip
        lines = (out / "timing.jsonl").read_text("utf-8").splitlines()
        iterations = [row for line in lines if "learn_s" in (row := json.loads(line))]
        times = {
            name: sum(row.get(key, 0.0) for row in iterations)
            for name, key in (("seconds", "wall_s"), ("collect_seconds", "collect_s"),
                              ("learn_seconds", "learn_s"))
        }  # fmt: skip
        return times, compute_state_digest(load(out / "latest.safetensors"))


if __name__ == "__main__":
    ended(main)
