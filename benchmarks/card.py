"""Check and time learning on a GPU, and print one table of all results.

    python benchmarks/card.py                       # about six minutes on a GPU with 16 cores
    python benchmarks/card.py --csv gpu.csv
    python benchmarks/card.py --device cpu --small  # every step of the script, without a GPU

The script first checks that a learner has the same bits twice, that a restored learner continues
in the same bits, and that its weights are close to numpy's. Then it times single updates with numpy
on one thread and on the device. At the end it trains whole runs through `rlflame train` and reports
updates and steps per second without start-up. A failed check does not end the script, but makes the
exit code 1. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from idle import others, processor
from ppo_update import drawn
from script import ended, table

from rlflame.config import resolve
from rlflame.config.flags import TrainFlags
from rlflame.experiment import components
from rlflame.learning import torch_gradients
from rlflame.learning.base import ReplayBatch, Transitions
from rlflame.learning.factory import make_algorithm
from rlflame.rollout import blas

COLUMNS = ["what", "case", "result", "unit", "compared_with", "ratio", "processor", "card",
           "others_before"]  # fmt: skip
#: (hidden units, minibatch size) of PPO's updates.
PPO_CASES = ((64, 64), (64, 512), (256, 1024), (256, 4096))
ROUNDS = 5
#: Weights may differ this much from numpy's after the updates of a check.
TOLERANCE = 1e-3
GSDE = "network.exploration=gsde"
#: By name: the environment, the algorithm and the settings. The last minibatch may be shorter.
CHECKS: dict[str, tuple[str, ...]] = {
    "PPO": ("halfcheetah", "ppo"),
    "PPO, options": ("halfcheetah", "ppo", "ppo.minibatch_size=500", "ppo.clip_range_value=0.2",
                     "ppo.entropy_weight=0.01", "ppo.normalise_advantages=minibatch"),
    "PPO, KL limit": ("halfcheetah", "ppo", "ppo.target_kl=2.9", "ppo.normalise_advantages=batch"),
    "PPO, whole batch": ("halfcheetah", "ppo", "ppo.minibatch_size=10000", GSDE),
    "PPO, discrete": ("cartpole", "ppo"),
    "SAC": ("halfcheetah", "sac"),
    "SAC, delays": ("halfcheetah", "sac", "sac.policy_delay=2", "sac.target_update_interval=64",
                    "sac.max_gradient_norm=1.0", "network.normalise_observations=true"),
    "SAC, gSDE": ("halfcheetah", "sac", GSDE),
    "SAC, quantiles": ("halfcheetah", "sac", "sac.quantiles=25", "sac.dropped_quantiles=2"),
    "SAC, normalised critics": ("halfcheetah", "sac", "sac.critic_norm=batch"),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a few updates of everything")
    parser.add_argument("--csv", type=table, help="CSV file, overwritten")
    options = parser.parse_args()
    if options.device == "cpu":
        # The recipe is that of a GPU, and its code runs eagerly on the CPU.
        torch_gradients.select_device = lambda kind, rank: "cpu"
    else:
        torch_gradients.select_device("cuda", 0)
    facts = [processor(), torch_gradients.read_gpu_name(), others()]
    print(f"{facts[0]}, {facts[1]}, {os.cpu_count()} cores", flush=True)
    rows, failed = [], False
    for part in (list_checks, list_updates, list_runs):
        for what, case, measure in part(options):
            try:
                result, unit, base = measure()
            except Exception:
                traceback.print_exc()
                result, unit, base = "failed", "", None
            failed |= result in ("failed", "different")
            ratio = f"{result / base:.2f}" if base else ""
            text = result if isinstance(result, str) else f"{result:,.4g}"
            beside = "" if base is None else f"{base:,.4g}"
            print(f"{what:24s}{case:34s}{text:>12s} {unit:12s}{beside:>10s} {ratio:>8s}",
                  flush=True)  # fmt: skip
            rows.append([what, case, text, unit, beside, ratio, *facts])
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    return int(failed)


Measurement = tuple[str, str, Callable[[], tuple[Any, str, float | None]]]


def list_checks(options: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the checks of bits and of closeness to numpy."""
    for name, case in CHECKS.items():
        yield "same bits twice", name, lambda case=case: (compare_twice(*case), "", None)
        yield "same bits after resume", name, lambda case=case: (compare_resumed(*case), "", None)
        yield "beside numpy", name, lambda case=case: (compare_with_numpy(*case), "max diff", None)


def list_updates(options: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the times of single updates on the device, beside numpy on one thread."""
    for width, size in PPO_CASES[: 1 if options.small else None]:
        yield "PPO update", f"{width}x{width} units, {size} samples", lambda w=width, s=size: (
            time_ppo("numpy", w, s, options.small) / time_ppo("torch", w, s, options.small),
            "x numpy", None,
        )  # fmt: skip
    yield "SAC updates", "HalfCheetah, mujoco-sac", lambda: (
        count_sac_updates("torch", options.small), "updates/s",
        count_sac_updates("numpy", options.small),
    )  # fmt: skip


def list_runs(options: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the speed of whole runs without start-up, and of their learning alone."""
    workers = str(max(1, (os.cpu_count() or 1) - 1))
    sac = ("--algo", "sac", "--workers", "4")
    wide = ("--preset", "mujoco-ppo-wide", "--workers", workers)
    large = (*wide, "--set", "ppo.minibatch_size=4096", "--set", "network.hidden=[256,256]")
    for what, words, steps, numpy_steps in (
        ("SAC", sac, 60_000, 14_000),
        ("PPO wide", wide, 3_000_000, 1_000_000),
        ("PPO 256x256, 4096", large, 1_000_000, 200_000),
    ):
        if options.small:
            words = (*words, "--set", "rollout.steps=8")
            words = (*words, "--set", "sac.learning_starts=100") if words[1] == "sac" else words
            steps = numpy_steps = 600 if words[1] == "sac" else 12_000
        for part, name in (("steps_per_s", "whole run"), ("learned_per_s", "learning alone")):
            yield f"{name}, steps/s", what, lambda w=words, n=steps, m=numpy_steps, p=part: (
                time_run(w, n, options.device)[p], "steps/s", time_run(w, m, "cpu")[p],
            )  # fmt: skip


def make(env: str, name: str, provider: str, *sets: str) -> tuple[Any, Any, Any]:
    """Make a learner, its policy spec and its settings."""
    flags = TrainFlags(
        env=env,
        algo=name,
        sets=[
            f"learning.provider={provider}",
            f"learning.device={'cuda' if provider == 'torch' else 'cpu'}",
            *sets,
        ],
    )
    config, _ = resolve.resolve(flags, components.has_continuous_actions)
    spec = components.make_policy_spec(
        config.learning, components.make_env_spec(config.learning.environment)
    )
    return make_algorithm(config.learning, spec), spec, config.learning


def make_batch(learner: Any, spec: Any, learning: Any, number: int = 0) -> Any:
    """Return random numbers for one update of PPO, or for 20 updates of SAC."""
    fresh = drawn(learning.rollout.steps, learning.rollout.columns, spec, learner.get_policy())
    if spec.action_kind == "discrete":
        actions = np.abs(fresh.actions[..., 0] * 100.0).astype(np.int64) % spec.action_size
        fresh = replace(fresh, actions=actions, log_probs=0.2 * fresh.log_probs)
    if learning.algorithm == "ppo":
        return fresh

    def draw(update: int) -> Transitions:
        rng, size = np.random.default_rng(update), learning.replay.batch_size
        normal = rng.standard_normal((2, size, spec.observation_size), dtype=np.float32)
        return Transitions(
            normal[0],
            np.tanh(rng.standard_normal((size, spec.action_size), dtype=np.float32)),
            rng.standard_normal(size, dtype=np.float32),
            normal[1],
            np.full(size, 0.99, np.float32),
        )

    return ReplayBatch(fresh, 20 * number, 20, draw)


def compare_twice(env: str, name: str, *sets: str) -> str:
    states = []
    for _ in range(2):
        learner, spec, learning = make(env, name, "torch", *sets)
        for number in range(2):
            learner.update(make_batch(learner, spec, learning, number), 0.0)
        states.append(learner.get_state())
    return "equal" if is_equal(*states) else "different"


def compare_resumed(env: str, name: str, *sets: str) -> str:
    whole, spec, learning = make(env, name, "torch", *sets)
    resumed, *_ = make(env, name, "torch", *sets)
    batches = [make_batch(whole, spec, learning, number) for number in range(3)]
    whole.update(batches[0], 0.0)
    whole.update(batches[1], 0.1)
    resumed.load_state(whole.get_state())
    for learner in (whole, resumed):
        learner.update(batches[2], 0.2)
    return "equal" if is_equal(whole.get_state(), resumed.get_state()) else "different"


def is_equal(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(
        first[name].tobytes() == second[name].tobytes() for name in first
    )


def compare_with_numpy(env: str, name: str, *sets: str) -> float | str:
    """Return the largest difference of a weight after one iteration."""
    sets = (*sets, *(("ppo.epochs=2", "rollout.num_slots=1") if name == "ppo" else ()))
    weights = []
    for provider in ("torch", "numpy"):
        learner, spec, learning = make(env, name, provider, *sets)
        learner.update(make_batch(learner, spec, learning), 0.0)
        state = learner.get_state()
        networks = [state[key] for key in ("parameters", "actor", "critics") if key in state]
        weights.append(np.concatenate(networks))
    difference = float(np.abs(weights[0] - weights[1]).max())
    is_close = bool(np.isfinite(weights[0]).all()) and difference < TOLERANCE
    return difference if is_close else "different"


def time_ppo(provider: str, width: int, size: int, small: bool) -> float:
    """Return the milliseconds of one minibatch of PPO."""
    minibatches = 4 if small else 16
    learner, spec, learning = make(
        "halfcheetah", "ppo", provider, f"ppo.minibatch_size={size}", "ppo.epochs=2",
        f"network.hidden=[{width},{width}]", "rollout.num_slots=1",
        f"rollout.envs_per_slot={minibatches}", f"rollout.steps={size}",
    )  # fmt: skip
    batch = make_batch(learner, spec, learning)
    blas.set_threads(1)
    return 1e3 * time_best(lambda: learner.update(batch, 0.0), small) / (2 * minibatches)


def count_sac_updates(provider: str, small: bool) -> float:
    """Return the updates per second of SAC with random transitions."""
    learner, spec, learning = make("halfcheetah", "sac", provider)
    batch = make_batch(learner, spec, learning)
    drawn_batches = {n: batch.draw(n) for n in range(20)}
    fast = ReplayBatch(batch.fresh, 0, 20 if small else 200, lambda n: drawn_batches[n % 20])
    return fast.updates / time_best(lambda: learner.update(fast, 0.0), small)


def time_best(work: Callable[[], object], small: bool) -> float:
    """Return the lowest seconds of several repetitions, without a first one."""
    times: list[float] = []
    rounds = 1 if small else ROUNDS
    for number in range(rounds + 1):
        start = time.perf_counter()
        work()
        if number:
            times.append(time.perf_counter() - start)
    return min(times)


@cache
def time_run(words: tuple[str, ...], steps: int, device: str) -> dict[str, float]:
    """Train, and return speeds in the last two thirds of the run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "rlflame", "train", "--env", "halfcheetah", *words,
                   "--steps", str(steps), "--device", device, "--local", "--quiet",
                   "--set", "evaluation.every_steps=none", "--set", "evaluation.final_episodes=1",
                   "--out", str(run)]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "timing.jsonl").open()]
    lines = [line for line in lines if "learn_s" in line]
    first = len(lines) // 3
    timed = lines[first + 1 :]
    count = timed[-1]["steps"] - lines[first]["steps"]
    return {
        "steps_per_s": count / sum(line["wall_s"] for line in timed),
        "learned_per_s": count / sum(line["learn_s"] for line in timed),
    }


if __name__ == "__main__":
    sys.exit(ended(main))
