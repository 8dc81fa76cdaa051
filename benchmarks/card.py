"""Check and time learning on a GPU, and print one table of all results.

    python benchmarks/card.py                       # about six minutes on a GPU with 16 cores
    python benchmarks/card.py --csv gpu.csv
    python benchmarks/card.py --device cpu --small  # every step of the script, without a GPU

The script first checks that a learner has the same bits twice, that a restored learner continues
in the same bits, that SAC has the same bits with the replay on the device and in CPU memory, and
that weights are close to numpy's. Then it times single updates with numpy on one thread and on the
device. At the end it trains whole runs through `rlflame train` and reports updates and steps per
second without start-up. A failed check does not end the script, but makes the exit code 1. Nothing
is downloaded.
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
from rlflame.learning.factory import keep_replay, make_algorithm, make_buffer
from rlflame.rollout import blas
from rlflame.rollout.task import Fragment

COLUMNS = ["what", "case", "result", "unit", "compared_with", "ratio", "processor", "card",
           "others_before"]  # fmt: skip
#: (hidden units, minibatch size) of PPO's updates.
PPO_CASES = ((64, 64), (64, 512), (256, 1024), (256, 4096))
ROUNDS = 5
#: Weights may differ this much from numpy's after the updates of a check.
TOLERANCE = 1e-3
GSDE = "network.exploration=gsde"
#: Twenty updates in each iteration of 512 steps, and a replay that the second iteration exceeds.
REPLAY = ("rollout.steps=64", "sac.updates_per_step=0.0390625", "sac.learning_starts=0",
          "sac.buffer_size=800")  # fmt: skip
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
    "SAC, n-step returns": ("halfcheetah", "sac", "sac.n_step=3"),
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
        if case[1] == "sac":
            yield "same bits in CPU memory", name, lambda case=case: (
                compare_replays(*case), "", None,
            )  # fmt: skip


def list_updates(options: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the times of single updates on the device, beside numpy on one thread."""
    for width, size in PPO_CASES[: 1 if options.small else None]:
        yield "PPO update", f"{width}x{width} units, {size} samples", lambda w=width, s=size: (
            time_ppo("numpy", w, s, options.small) / time_ppo("torch", w, s, options.small),
            "x numpy", None,
        )  # fmt: skip
    for case, on_device in (("HalfCheetah, mujoco-sac", True), ("replay in CPU memory", False)):
        yield "SAC updates", case, lambda on_device=on_device: (
            count_sac_updates("torch", options.small, on_device), "updates/s",
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


class Learner:
    """A learner of a recipe and its replay buffer, which gets random transitions."""

    def __init__(
        self, env: str, name: str, provider: str, *sets: str, on_device: bool = True
    ) -> None:
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
        self.learning = config.learning
        env_spec = components.make_env_spec(self.learning.environment)
        self.spec = components.make_policy_spec(self.learning, env_spec)
        self.algorithm = make_algorithm(self.learning, self.spec)
        self.buffer: Any = make_buffer(self.learning, env_spec)
        if on_device and (note := keep_replay(self.learning, self.algorithm, self.buffer)):
            raise RuntimeError(note)

    def learn(self, number: int, progress: float = 0.0) -> None:
        """Learn from random numbers, which depend only on the number of the iteration."""
        rollout = self.learning.rollout
        if self.learning.replay is None:
            self.algorithm.update(self.draw_batch(), progress)
            return
        self.buffer.add([draw_fragment(number, rollout.steps, rollout.columns, self.spec)], {})
        for batch in self.buffer.take_batches():
            self.algorithm.update(batch, progress)

    def draw_batch(self) -> Any:
        """Return a batch for PPO."""
        rollout, spec = self.learning.rollout, self.spec
        batch = drawn(rollout.steps, rollout.columns, spec, self.algorithm.get_policy())
        if spec.action_kind == "continuous":
            return batch
        actions = np.abs(batch.actions[..., 0] * 100.0).astype(np.int64) % spec.action_size
        return replace(batch, actions=actions, log_probs=0.2 * batch.log_probs)

    def resume(self, other: Learner) -> None:
        self.algorithm.load_state(other.algorithm.get_state())
        self.buffer.load_state(other.buffer.get_state(), other.buffer.list_segments())


def draw_fragment(seed: int, steps: int, columns: int, spec: Any) -> Fragment:
    rng, size = np.random.default_rng(seed), spec.observation_size

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32)

    chance = rng.random((steps, columns))
    index = np.argwhere(chance > 0.95)
    return Fragment(
        iteration=0,
        slot=0,
        observations=normal(steps, columns, size),
        actions=np.tanh(normal(steps, columns, spec.action_size)),
        log_probs=normal(steps, columns),
        rewards=rng.standard_normal((steps, columns)),
        terminated=chance < 0.05,
        truncated=chance > 0.95,
        lengths=np.full(columns, steps),
        last_observations=normal(columns, size),
        boundary_index=index,
        boundary_observations=normal(len(index), size),
        episodes=(),
        states=(),
    )


def make(env: str, name: str, provider: str, *sets: str, on_device: bool = True) -> Learner:
    """Make the learner of a check."""
    sets = (*sets, *(REPLAY if name == "sac" else ()))
    return Learner(env, name, provider, *sets, on_device=on_device)


def compare_twice(env: str, name: str, *sets: str) -> str:
    return compare_after_learning(*(make(env, name, "torch", *sets) for _ in range(2)))


def compare_resumed(env: str, name: str, *sets: str) -> str:
    whole, resumed = (make(env, name, "torch", *sets) for _ in range(2))
    whole.learn(0)
    whole.learn(1, 0.1)
    resumed.resume(whole)
    for learner in (whole, resumed):
        learner.learn(2, 0.2)
    return compare_states(whole, resumed)


def compare_replays(env: str, name: str, *sets: str) -> str:
    """Compare a learner that samples on the device with one that samples in CPU memory."""
    places = True, False
    return compare_after_learning(
        *(make(env, name, "torch", *sets, on_device=place) for place in places)
    )


def compare_after_learning(first: Learner, second: Learner) -> str:
    for learner in (first, second):
        learner.learn(0)
        learner.learn(1)
    return compare_states(first, second)


def compare_states(first: Learner, second: Learner) -> str:
    states = first.algorithm.get_state(), second.algorithm.get_state()
    return "equal" if is_equal(*states) else "different"


def is_equal(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(
        first[name].tobytes() == second[name].tobytes() for name in first
    )


def compare_with_numpy(env: str, name: str, *sets: str) -> float | str:
    """Return the largest difference of a weight after one iteration."""
    sets = (*sets, *(("ppo.epochs=2", "rollout.num_slots=1") if name == "ppo" else ()))
    weights = []
    for provider in ("torch", "numpy"):
        learner = make(env, name, provider, *sets)
        learner.learn(0)
        state = learner.algorithm.get_state()
        networks = [state[key] for key in ("parameters", "actor", "critics") if key in state]
        weights.append(np.concatenate(networks))
    difference = float(np.abs(weights[0] - weights[1]).max())
    is_close = bool(np.isfinite(weights[0]).all()) and difference < TOLERANCE
    return difference if is_close else "different"


def time_ppo(provider: str, width: int, size: int, small: bool) -> float:
    """Return the milliseconds of one minibatch of PPO."""
    minibatches = 4 if small else 16
    learner = make(
        "halfcheetah", "ppo", provider, f"ppo.minibatch_size={size}", "ppo.epochs=2",
        f"network.hidden=[{width},{width}]", "rollout.num_slots=1",
        f"rollout.envs_per_slot={minibatches}", f"rollout.steps={size}",
    )  # fmt: skip
    batch = learner.draw_batch()
    blas.set_threads(1)
    return 1e3 * time_best(lambda: learner.algorithm.update(batch, 0.0), small) / (2 * minibatches)


def count_sac_updates(provider: str, small: bool, on_device: bool = True) -> float:
    """Return the updates per second of SAC with random transitions."""
    learner = Learner("halfcheetah", "sac", provider, on_device=on_device)
    columns = learner.learning.rollout.columns
    for number in range(1 if small else 20):
        fragment = draw_fragment(number, 100 if small else 1000, columns, learner.spec)
        learner.buffer.add([fragment], {})
    (batch,) = learner.buffer.take_batches()
    batch = replace(batch, first_update=0, updates=20 if small else 200)
    return batch.updates / time_best(lambda: learner.algorithm.update(batch, 0.0), small)


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
