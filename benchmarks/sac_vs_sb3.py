"""Compare the speed of SAC in rlflame and in stable-baselines3.

    python benchmarks/sac_vs_sb3.py --sb3-python OTHER/bin/python --env Hopper-v5 --threads 1,2
    python benchmarks/sac_vs_sb3.py --sb3-python OTHER/bin/python --own --env Hopper-v5,Ant-v5

Both libraries train networks of 256x256 units on batches of 256, with one update per step. The
measured time is from the end of the random steps to the end of training, without start-up and
evaluation. stable-baselines3 is measured with one environment and with eight, and the ratio is
relative to the faster of the two. The limit is the time of the sixteen 256x256x256 products of one
update with numpy's BLAS. With `--own`, rlflame uses its preset for the environment, and
stable-baselines3 uses one environment.
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

from script import ended, positive, table

WARM_UP = 1_000
PRODUCTS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sb3-python", default=sys.executable)
    parser.add_argument("--env", default="Hopper-v5", help="environments, separated by commas")
    parser.add_argument("--own", action="store_true", help="use the environment's preset")
    parser.add_argument("--steps", type=positive, default=5_000, help="after the random steps")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--repeat", type=positive, default=3)
    parser.add_argument("--csv", type=table)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--side", choices=["sb3", "limit"], help=argparse.SUPPRESS)
    parser.add_argument("--envs", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "sb3":
        train_sb3(options.env, options.steps, int(options.threads), options.envs)
        return
    if options.side == "limit":
        print(json.dumps(product_rate()))
        return
    # The stable-baselines3 side of this script runs without rlflame.
    from idle import others

    others()
    results: list[dict[str, object]] = []
    for env in options.env.split(","):
        for threads in map(int, options.threads.split(",")):
            measure(options, env, threads, results)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(results[0]))
            writer.writeheader()
            writer.writerows(results)


def measure(
    options: argparse.Namespace, env: str, threads: int, results: list[dict[str, object]]
) -> None:
    """Run all sides in turn, --repeat times, and print the medians and the ratio."""
    of_theirs = {"sb3 1 env": 1} if options.own else {"sb3 1 env": 1, "sb3 8 envs": 8}
    # With the MuJoCo family's preset, rlflame makes one update per step, as stable-baselines3 does.
    what, preset = ("steps_per_s", None) if options.own else ("updates_per_s", "mujoco-sac")
    rates: dict[str, list[float]] = {}
    for turn in range(options.repeat):
        rate = {"rlflame": ours(env, preset, options.steps, threads, turn, options.sets)}
        for side, envs in of_theirs.items():
            rate[side] = theirs(options, env, threads, envs)
        if not options.own:
            bare = spoken([sys.executable, __file__, "--side", "limit"], threads)
            rate["limit"] = bare / PRODUCTS
        for side, value in rate.items():
            rates.setdefault(side, []).append(value)
            results.append({"env": env, "threads": threads, "turn": turn, "side": side,
                            what: round(value, 2)})  # fmt: skip
    medians = {side: statistics.median(values) for side, values in rates.items()}
    best = max(medians[side] for side in of_theirs)
    limit = medians.get("limit")
    print(f"{env}, {threads} thread{'s' * (threads > 1)}: " + ", ".join(
        f"{side} {value:.0f}/s" for side, value in medians.items()
    ) + f"; {medians['rlflame'] / best:.2f} times their best"
      + (f", {medians['rlflame'] / limit:.0%} of the limit" if limit else ""),
      flush=True)  # fmt: skip


def ours(
    env: str, preset: str | None, steps: int, threads: int, seed: int, sets: list[str]
) -> float:
    """Return rlflame's steps per second after the random steps, from timing.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/run"
        settings = [f"sac.learning_starts={WARM_UP}", f"learning.threads={threads}", *sets,
                    "evaluation.every_steps=none", "evaluation.final_episodes=1"]  # fmt: skip
        command = [sys.executable, "-m", "rlflame", "train", "--local", "--algo", "sac",
                   "--env", env, "--steps", str(WARM_UP + steps), "--seed", str(seed), "--quiet",
                   "--out", out, *(["--preset", preset] if preset else [])]  # fmt: skip
        for setting in settings:
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment(threads))
        seconds, taken = 0.0, 0
        for line in Path(out, "timing.jsonl").read_text().splitlines():
            lap = json.loads(line)
            if "closing" in lap:
                continue
            if lap["steps"] > 2 * WARM_UP:
                seconds += lap["wall_s"]
            else:
                taken = lap["steps"]
        if not seconds:
            raise SystemExit(f"{steps} steps are too few to measure: increase --steps")
        return (lap["steps"] - taken) / seconds


def theirs(options: argparse.Namespace, env: str, threads: int, envs: int) -> float:
    command = [options.sb3_python, str(Path(__file__).resolve()), "--side", "sb3", "--env",
               env, "--steps", str(options.steps), "--envs", str(envs),
               "--threads", str(threads)]  # fmt: skip
    return spoken(command, threads)


def spoken(command: list[str], threads: int) -> float:
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment(threads)
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def environment(threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(threads))}


def train_sb3(env: str, steps: int, threads: int, envs: int) -> None:
    """Train with few random steps, and print the steps per second after them."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(threads)

    class Clock(BaseCallback):
        began = 0.0
        first = 0

        def _on_step(self) -> bool:
            if not self.began and self.num_timesteps > 2 * WARM_UP:
                self.began, self.first = time.monotonic(), self.num_timesteps
            return True

    clock = Clock()
    model = stable_baselines3.SAC(
        "MlpPolicy", make_vec_env(env, envs), learning_starts=WARM_UP, batch_size=256,
        train_freq=1, gradient_steps=-1 if envs > 1 else 1, device="cpu",
    )  # fmt: skip
    model.learn(WARM_UP + steps, callback=clock)
    print(json.dumps((model.num_timesteps - clock.first) / (time.monotonic() - clock.began)))


def product_rate() -> float:
    """Return the number of 256x256x256 products per second."""
    import numpy as np

    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((2, 256, 256), dtype=np.float32)
    out = np.empty_like(a)
    best = 0.0
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(100):
            np.matmul(a, b, out=out)
        best = max(best, 100 / (time.perf_counter() - started))
    return best


if __name__ == "__main__":
    ended(main)
