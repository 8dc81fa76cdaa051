"""Train with stable-baselines3, and evaluate its policies as rlflame does.

    OTHER/bin/python benchmarks/control.py sac HalfCheetah-v5 --seeds 0-1 --csv control.csv
    OTHER/bin/python benchmarks/control.py ppo Hopper-v5 --steps 1000000 --seeds 0-2 --csv ppo.csv
    OTHER/bin/python benchmarks/control.py ppo-zoo Hopper-v5 --steps 1000000 --csv ppo.csv

Run this script with the Python of a virtual environment that contains stable-baselines3. The script
does not import rlflame. `ppo` and `sac` use the defaults of stable-baselines3, except that SAC
starts with 10,000 random steps, as in RL Baselines3 Zoo and rlflame. `ppo-zoo` uses the tuned
hyperparameters of RL Baselines3 Zoo. An evaluation has 20 episodes without exploration, with the
same reset seeds as `rlflame eval`.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from script import ended, positive, table

COLUMNS = ["algo", "env", "seed", "step", "return_mean", "return_std", "episodes", "train_seconds"]
EPISODES = 20
#: The key of rlflame's random streams for the resets of evaluations.
EVALUATION_RESET = 3
#: Two layers of 256 ReLU units, without orthogonal initialisation, and a small initial deviation.
_WIDE = {"net_arch": [256, 256], "activation_fn": "relu", "log_std_init": -2.0, "ortho_init": False}
#: Hyperparameters from RL Baselines3 Zoo, tuned for older versions of the environments. All four
#: use one environment, 512 steps per update, and normalised observations and rewards. For Ant, the
#: zoo uses the defaults with this normalisation.
ZOO: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": {
        "batch_size": 64, "gamma": 0.98, "learning_rate": 2.0633e-05, "ent_coef": 0.000401762,
        "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8,
        "vf_coef": 0.58096, "policy_kwargs": _WIDE,
    },
    "Hopper-v5": {
        "batch_size": 32, "gamma": 0.999, "learning_rate": 9.80828e-05, "ent_coef": 0.00229519,
        "clip_range": 0.2, "n_epochs": 5, "gae_lambda": 0.99, "max_grad_norm": 0.7,
        "vf_coef": 0.835671, "policy_kwargs": _WIDE,
    },
    "Walker2d-v5": {
        "batch_size": 32, "gamma": 0.99, "learning_rate": 5.05041e-05, "ent_coef": 0.000585045,
        "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.95, "max_grad_norm": 1.0,
        "vf_coef": 0.871923,
    },
    "Ant-v5": {"n_steps": 2048},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algo", choices=["sac", "ppo", "ppo-zoo"])
    parser.add_argument("env")
    parser.add_argument("--steps", type=positive, default=300_000)
    parser.add_argument("--seeds", default="0-1")
    parser.add_argument("--every", type=int, default=50_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--learning-starts", type=int, default=10_000, help="random steps at the start of SAC"
    )
    parser.add_argument("--csv", type=table, required=True)
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    for seed in range(int(first), int(last or first) + 1):
        if recorded(options, seed):
            raise SystemExit(f"{options.csv} has seed {seed} of {options.env}: use another --csv.")
        train(options, seed)


def label(options: argparse.Namespace) -> str:
    """The name of the algorithm in the CSV file, such as `ppo-zoo-sb3`."""
    return f"{options.algo}-sb3"


def recorded(options: argparse.Namespace, seed: int) -> bool:
    if not options.csv.exists():
        return False
    wanted = (label(options), options.env, str(seed))
    with options.csv.open(newline="") as file:
        return any((row["algo"], row["env"], row["seed"]) == wanted for row in csv.DictReader(file))


def made(options: argparse.Namespace, seed: int) -> tuple[Any, Callable[[Any], Any]]:
    """Make an untrained model and the function that preprocesses its observations."""
    import stable_baselines3 as sb3

    common = {"seed": seed, "device": "cpu"}
    if options.algo == "sac":
        starts = options.learning_starts
        return sb3.SAC("MlpPolicy", options.env, learning_starts=starts, **common), as_it_is
    if options.algo == "ppo":
        return sb3.PPO("MlpPolicy", options.env, **common), as_it_is
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize
    from torch import nn

    settings = {"n_steps": 512, **ZOO[options.env]}
    kwargs = dict(settings.pop("policy_kwargs", {}))
    if kwargs:
        kwargs["activation_fn"] = nn.ReLU
    env = VecNormalize(make_vec_env(options.env, 1, seed=seed), gamma=settings.get("gamma", 0.99))
    model = sb3.PPO("MlpPolicy", env, policy_kwargs=kwargs, **settings, **common)
    return model, env.normalize_obs


def as_it_is(observation: Any) -> Any:
    return observation


def train(options: argparse.Namespace, seed: int) -> None:
    import torch

    torch.set_num_threads(options.threads)
    model, shown = made(options, seed)
    started, evaluated = time.monotonic(), 0.0
    for step in range(options.every, options.steps + 1, options.every):
        model.learn(step - model.num_timesteps, reset_num_timesteps=False)
        before = time.monotonic()
        returns = score(model, options.env, shown)
        evaluated += time.monotonic() - before
        seconds = time.monotonic() - started - evaluated
        row = [label(options), options.env, seed, int(model.num_timesteps), returns.mean(),
               returns.std(), EPISODES, round(seconds, 1)]  # fmt: skip
        write(options.csv, row)
        print(*row, flush=True)


def write(path: Path, row: list[object]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(row)


def score(model: Any, name: str, shown: Callable[[Any], Any]) -> np.ndarray:
    import gymnasium

    returns = []
    for episode in range(EPISODES):
        sequence = np.random.SeedSequence(0, spawn_key=(EVALUATION_RESET, episode))
        env = gymnasium.make(name)
        observation, _ = env.reset(seed=int(sequence.generate_state(1, np.uint32)[0]))
        total, ended = 0.0, False
        while not ended:
            action, _ = model.predict(shown(observation), deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            ended = terminated or truncated
        env.close()
        returns.append(total)
    return np.array(returns)


if __name__ == "__main__":
    ended(main)
