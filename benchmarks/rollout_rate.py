"""One worker's environment steps a second beside a plain Gymnasium loop, A B A B, one core.

    python benchmarks/rollout_rate.py --env Hopper-v5

The plain loop steps one environment with random actions and resets it; the worker runs the tasks
of the environment's own preset, policy included.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import dataclasses
import statistics
import time

import gymnasium

from rlflame import build, presets
from rlflame.learner import Algorithm
from rlflame.rollout.lockstep import fresh_state
from rlflame.rollout.seeding import Role, reset_seed
from rlflame.rollout.spec import Fragment, RolloutTask
from rlflame.rollout.worker import RolloutWorker
from rlflame.trainer import Plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="Hopper-v5")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    config, _ = presets.resolve(environment=options.env, continuous=build.acts_continuously)
    env = build.environment(config.learning.environment)
    plan = build.plan(config.recipe, env, "rate")
    learner = build.algorithm(config.learning, plan.policy)
    ratios = []
    for pair in range(options.repeat):
        ours = worker_rate(plan, learner, options.seconds)
        plain = plain_rate(options.env, options.seconds)
        ratios.append(ours / plain)
        print(f"pair {pair + 1}: worker {ours:,.0f} steps/s, plain loop {plain:,.0f}, "
              f"ratio {ours / plain:.2f}", flush=True)  # fmt: skip
    print(f"{options.env}: {statistics.median(ratios):.2f} (median of {len(ratios)})")


def worker_rate(plan: Plan, learner: Algorithm, seconds: float) -> float:
    policy = learner.policy()
    rows = range(plan.envs_per_slot)
    task = RolloutTask(
        run="rate", seed=0, purpose="train", iteration=0, slot=0, env=plan.env,
        policy=plan.policy, policy_id="p", unit="steps", steps=plan.steps,
        rows=plan.envs_per_slot, first_row=0, acting="sample", record=True,
        states=tuple(fresh_state(0, reset_seed(0, Role.RESET, 0, row, 0)) for row in rows),
    )  # fmt: skip
    worker = RolloutWorker()

    def run(task: RolloutTask) -> RolloutTask:
        fragment = worker.run(task, lambda: policy)
        assert isinstance(fragment, Fragment)
        return dataclasses.replace(task, states=fragment.states, iteration=task.iteration + 1)

    task = run(task)
    started, tasks = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        task, tasks = run(task), tasks + 1
    worker.close()
    return tasks * plan.steps * plan.envs_per_slot / elapsed


def plain_rate(id: str, seconds: float) -> float:
    env = gymnasium.make(id)
    env.reset(seed=0)
    env.action_space.seed(0)
    started, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        steps += 1
        if terminated or truncated:
            env.reset()
    env.close()
    return steps / elapsed


if __name__ == "__main__":
    main()
