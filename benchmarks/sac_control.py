"""stable-baselines3's SAC, scored as rlflame scores: a control for the study.

    OTHER/bin/python benchmarks/sac_control.py HalfCheetah-v5 --seeds 0-1 --csv control.csv

Runs in an environment that has stable-baselines3; rlflame is not needed there. Its defaults, but
for 10,000 random steps at the start instead of 100, which its own zoo gives these environments and
rlflame does too. Twenty episodes without exploration, from the very reset seeds that `rlflame eval`
uses.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import numpy as np

COLUMNS = ["algo", "env", "seed", "step", "return_mean", "return_std", "episodes", "train_seconds"]
EPISODES = 20
#: rlflame's key of an evaluation's reset seeds.
EVALUATION_RESET = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env")
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seeds", default="0-1")
    parser.add_argument("--every", type=int, default=50_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--learning-starts", type=int, default=10_000)
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    for seed in range(int(first), int(last or first) + 1):
        if recorded(options.csv, options.env, seed):
            raise SystemExit(f"{options.csv} has seed {seed} of {options.env}: another --csv.")
        train(options, seed)


def recorded(path: Path, env: str, seed: int) -> bool:
    if not path.exists():
        return False
    with path.open(newline="") as file:
        return any(row["env"] == env and row["seed"] == str(seed) for row in csv.DictReader(file))


def train(options: argparse.Namespace, seed: int) -> None:
    import stable_baselines3
    import torch

    torch.set_num_threads(options.threads)
    model = stable_baselines3.SAC(
        "MlpPolicy",
        options.env,
        learning_starts=options.learning_starts,
        seed=seed,
        device="cpu",
    )
    started, evaluated = time.monotonic(), 0.0
    for step in range(options.every, options.steps + 1, options.every):
        model.learn(options.every, reset_num_timesteps=False)
        before = time.monotonic()
        returns = score(model, options.env)
        evaluated += time.monotonic() - before
        seconds = time.monotonic() - started - evaluated
        row = ["sac-sb3", options.env, seed, step, returns.mean(), returns.std(), EPISODES,
               round(seconds, 1)]  # fmt: skip
        new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(COLUMNS)
            writer.writerow(row)
        print(*row, flush=True)


def score(model: object, name: str) -> np.ndarray:
    import gymnasium

    returns = []
    for episode in range(EPISODES):
        sequence = np.random.SeedSequence(0, spawn_key=(EVALUATION_RESET, episode))
        env = gymnasium.make(name)
        observation, _ = env.reset(seed=int(sequence.generate_state(1, np.uint32)[0]))
        total, ended = 0.0, False
        while not ended:
            action, _ = model.predict(observation, deterministic=True)  # type: ignore[attr-defined]
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            ended = terminated or truncated
        env.close()
        returns.append(total)
    return np.array(returns)


if __name__ == "__main__":
    main()
