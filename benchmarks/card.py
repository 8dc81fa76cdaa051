"""Time a PPO update on a CPU and a GPU for several widths and minibatch sizes.

    python benchmarks/card.py --width 64,256,1024 --minibatch 64,1024,8192
    python benchmarks/card.py --threads 16 --csv docs/results/card.csv

Each network has two layers of the given width; the other settings come from the Hopper preset. The
learner trains on random numbers in three ways: with numpy on one thread, with numpy on `--threads`
threads, and with torch on the GPU. One update is one epoch of four minibatches, including values,
advantages and shuffling. A printed time is a quarter of an update. It is the lowest of five rounds,
in which the three ways take turns.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import time

from idle import others, processor
from ppo_update import drawn
from script import ended, positive, table

from rlflame.config import resolve
from rlflame.config.flags import TrainFlags
from rlflame.errors import ConfigError
from rlflame.experiment import components
from rlflame.learning.factory import make_algorithm
from rlflame.learning.torch_gradients import is_cuda_available, read_gpu_name
from rlflame.rollout import blas

ROUNDS = 5
MINIBATCHES = 4
COLUMNS = ["width", "minibatch", "one_thread_ms", "threads", "threads_ms", "card_ms", "processor",
           "card", "others_before"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", default="64,256,1024")
    parser.add_argument("--minibatch", default="64,1024,8192")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--csv", type=table, help="CSV file, overwritten")
    options = parser.parse_args()
    sizes = [options.width.split(","), options.minibatch.split(",")]
    if not all(size.isdigit() and int(size) for size in itertools.chain(*sizes)):
        parser.error("--width and --minibatch take positive integers, separated by commas")
    if not is_cuda_available():
        raise ConfigError("torch finds no CUDA device here.", "use a machine with a GPU")
    note = others()
    print(f"{processor()}, {read_gpu_name()}")
    print(f"width   minibatch   one thread ms   {options.threads} threads ms   card ms")
    found = []
    for width, rows in itertools.product(*sizes):
        # The provider that computes the gradients, and the number of CPU threads.
        sides = [("numpy", 1), ("numpy", options.threads), ("torch", 1)]
        learners = [made(int(width), int(rows), provider) for provider, _ in sides]
        times: list[list[float]] = [[] for _ in sides]
        for number in range(ROUNDS + 1):
            for place, (_, threads) in enumerate(sides):
                learner, batch = learners[place]
                blas.set_threads(threads)
                begun = time.perf_counter()
                learner.update(batch, 0.0)
                if number:
                    times[place].append(1e3 * (time.perf_counter() - begun) / MINIBATCHES)
        one, many, there = map(min, times)
        print(f"{width:>5s}{rows:>12s}{one:16.2f}{many:16.2f}{there:10.2f}", flush=True)
        found.append([width, rows, f"{one:.3f}", options.threads, f"{many:.3f}", f"{there:.3f}",
                      processor(), read_gpu_name(), note])  # fmt: skip
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *found])


def made(width: int, rows: int, provider: str):  # type: ignore[no-untyped-def]
    """Make a learner and a random batch for it."""
    flags = TrainFlags(
        env="hopper",
        sets=[
            f"ppo.minibatch_size={rows}",
            "ppo.epochs=1",
            f"network.hidden=[{width}, {width}]",
            f"learning.provider={provider}",
            f"learning.device={'cuda' if provider == 'torch' else 'cpu'}",
            "rollout.num_slots=1",
            f"rollout.envs_per_slot={MINIBATCHES}",
            f"rollout.steps={rows}",
        ],
    )
    config, _ = resolve.resolve(flags, components.has_continuous_actions)
    learning = config.learning
    spec = components.make_policy_spec(learning, components.make_env_spec(learning.environment))
    learner = make_algorithm(learning, spec)
    rollout = learning.rollout
    return learner, drawn(rollout.steps, rollout.columns, spec, learner.get_policy())


if __name__ == "__main__":
    ended(main)
