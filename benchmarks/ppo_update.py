"""Time PPO updates on one thread, and compare them with their matrix products.

    python benchmarks/ppo_update.py --env hopper,ant --minibatch 64,256
    python benchmarks/ppo_update.py --csv docs/results/ppo_update.csv

The learner uses the preset of the environment and trains on random numbers. The script measures
four variants:

update      the update of rlflame, a minibatch of several epochs with the shuffles
products    only the matrix products of an update, the lower limit of any implementation in numpy
matmul      the update of rlflame with `np.matmul` in place of `np.dot`
autograd    the update with torch's autograd

The time of the products is a tenth percentile, which is nearly equal on busy and idle machines. The
time of an update is the lowest mean over the minibatches of an iteration. The time of an iteration
also includes values and advantages. It is the lowest processor time.
"""

from __future__ import annotations

import os

from script import ended, table

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import csv
import itertools
import time
from unittest import mock

import numpy as np
from idle import others, processor

from rlflame.config import resolve
from rlflame.config.flags import TrainFlags
from rlflame.errors import ConfigError
from rlflame.experiment import components
from rlflame.learning.base import Batch
from rlflame.learning.factory import make_algorithm

ROUNDS = 7
COLUMNS = ["env", "minibatch", "update_us", "products_us", "matmul_us", "autograd_us",
           "iteration_ms", "processor", "others_before"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="hopper,halfcheetah,ant")
    parser.add_argument("--minibatch", default="64,256")
    parser.add_argument("--csv", type=table, help="CSV file, overwritten")
    options = parser.parse_args()
    sizes = options.minibatch.split(",")
    if not all(size.isdigit() and int(size) for size in sizes):
        parser.error(f"--minibatch is {options.minibatch}, not numbers of samples")
    note = others()
    print(f"{processor()}, one thread{f', {note} processors at work before' if note else ''}")
    print("environment   minibatch   update us   products us   share   matmul us   autograd us   "
          "times   iteration ms")  # fmt: skip
    found = []
    for env, size in itertools.product(options.env.split(","), sizes):
        update, products, iteration = measured(env, int(size), "numpy")
        with mock.patch.object(np, "dot", np.matmul):
            matmul, _, _ = measured(env, int(size), "numpy")
        theirs, _, _ = measured(env, int(size), "torch")
        print(f"{env:13s} {size:>9s} {update:11.1f} {products:13.1f} {products / update:7.0%} "
              f"{matmul:11.1f} {theirs:13.1f} {theirs / update:7.1f} {iteration:14.1f}",
              flush=True)  # fmt: skip
        found.append([env, size, *(f"{us:.2f}" for us in (update, products, matmul, theirs)),
                      f"{iteration:.2f}", processor(), note])  # fmt: skip
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *found])


def measured(env: str, rows: int, provider: str) -> tuple[float, float, float]:
    """Return microseconds of an update and its products, and ms of an iteration."""
    sets = [f"ppo.minibatch_size={rows}", f"learning.provider={provider}"]
    flags = TrainFlags(env=env, sets=sets)
    config, _ = resolve.resolve(flags, components.has_continuous_actions)
    learning = config.learning
    described = components.make_env_spec(learning.environment)
    spec = components.make_policy_spec(learning, described)
    if spec.action_kind == "discrete":
        raise ConfigError(f"{env} has no continuous actions.", "--env hopper")
    learner = make_algorithm(learning, spec)
    run_epochs, spent_us = learner._run_epochs, []

    def time_epochs(*given):  # type: ignore[no-untyped-def]
        begun = time.perf_counter_ns()
        metrics = run_epochs(*given)
        spent_us.append((time.perf_counter_ns() - begun) / 1e3)
        return metrics

    learner._run_epochs = time_epochs
    rollout = learning.rollout
    batch = drawn(rollout.steps, rollout.columns, spec, learner.get_policy())
    sizes = (spec.observation_size, *spec.hidden)
    count = learning.ppo.epochs * (rollout.steps * rollout.columns // rows)
    bare, whole = [], []
    for number in range(ROUNDS):
        begun = time.process_time()
        learner.update(batch, 0.0)
        whole.append(time.process_time() - begun)
        if number:
            bare.append(products_us(sizes, (spec.action_size, 1), rows, count))
    return min(spent_us) / count, min(bare), 1e3 * min(whole)


def products_us(hidden: tuple[int, ...], outputs: tuple[int, ...], rows: int, times: int) -> float:
    """Time an update's matrix products: forward, weight and input gradients."""
    calls = []
    for output in outputs:
        sizes = (*hidden, output)
        forward, backward = [], []
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            weights = np.full((fan_in + 1, fan_out), 0.01, np.float32)
            x = np.full((fan_in + 1, rows), 0.01, np.float32)
            y = np.full((fan_out, rows), 0.01, np.float32)
            forward.append((weights.T, x, y))
            steps = [(x, y.T, np.empty_like(weights))]
            if layer:
                steps.append((weights[:-1], y, np.empty((fan_in, rows), np.float32)))
            backward = [*steps, *backward]
        calls += [*forward, *backward]
    marks = [time.perf_counter_ns()]
    for _ in range(times):
        for a, b, out in calls:
            np.dot(a, b, out=out)
        marks.append(time.perf_counter_ns())
    return float(np.quantile(np.diff(marks), 0.1)) / 1e3


def drawn(steps: int, columns: int, spec, behaviour) -> Batch:  # type: ignore[no-untyped-def]
    generator = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    nobody = np.zeros((steps, columns), np.bool_)
    return Batch(
        observations=numbers(steps, columns, spec.observation_size),
        actions=0.5 * numbers(steps, columns, spec.action_size),
        log_probs=0.05 * numbers(steps, columns) - spec.action_size,
        rewards=generator.standard_normal((steps, columns)),
        terminated=generator.random((steps, columns)) < 0.005,
        truncated=nobody,
        valid=~nobody,
        last_observations=numbers(columns, spec.observation_size),
        boundary_index=np.empty((0, 2), np.int64),
        boundary_observations=np.empty((0, spec.observation_size), np.float32),
        behaviour=behaviour,
    )


if __name__ == "__main__":
    ended(main)
