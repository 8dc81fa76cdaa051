"""PPO end to end beside stable-baselines3 with its defaults, in turn, on this machine.

    python benchmarks/ppo_vs_sb3.py --sb3-python OTHER/bin/python --env Hopper-v5

Both are timed from the start of their process to the end of their last evaluation, A B A B, and
the ratio is taken pair by pair. The two may live in different virtual environments; each should
have the same versions of gymnasium, mujoco, numpy and torch, which are printed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EVALUATION_EPISODES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sb3-python", default=sys.executable)
    parser.add_argument("--env", default="Hopper-v5")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--sb3", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sb3:
        train_sb3(options.env, options.steps)
        return
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"note: the load here is {busy:.1f}; a busy machine makes these numbers worthless")
    results = []
    for pair in range(options.repeat):
        ours = timed(rlflame_command(options.env, options.steps, pair))
        theirs = timed(
            [options.sb3_python, str(Path(__file__).resolve()), "--sb3", "--env", options.env,
             "--steps", str(options.steps)]
        )  # fmt: skip
        results.append((ours, theirs))
        print(f"pair {pair + 1}: rlflame {options.steps / ours:,.0f} steps/s, "
              f"stable-baselines3 {options.steps / theirs:,.0f}, "
              f"ratio {theirs / ours:.2f}", flush=True)  # fmt: skip
    ratios = sorted(theirs / ours for ours, theirs in results)
    median = statistics.median(ratios)
    print(f"{options.env}, {options.steps} steps, {len(os.sched_getaffinity(0))} cores: "
          f"{median:.2f} times as fast (median of {len(ratios)}, "
          f"{ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["env", "steps", "pair", "rlflame_s", "sb3_s"])
            for pair, (ours, theirs) in enumerate(results):
                writer.writerow(
                    [options.env, options.steps, pair, round(ours, 3), round(theirs, 3)]
                )


def rlflame_command(env: str, steps: int, seed: int) -> list[str]:
    """The defaults of the command line, nothing tuned for the benchmark."""
    return [sys.executable, "-m", "rlflame", "train", "--local", "--env", env,
            "--steps", str(steps), "--seed", str(seed), "--quiet"]  # fmt: skip


def timed(command: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        return time.monotonic() - started


def train_sb3(env: str, steps: int) -> None:
    """As their documentation shows it: defaults, then their own evaluation."""
    import gymnasium
    import stable_baselines3
    from stable_baselines3.common.evaluation import evaluate_policy

    model = stable_baselines3.PPO("MlpPolicy", env, device="cpu")
    model.learn(steps)
    mean, std = evaluate_policy(model, gymnasium.make(env), EVALUATION_EPISODES)
    print(json.dumps({"mean": float(mean), "std": float(std)}))


if __name__ == "__main__":
    main()
