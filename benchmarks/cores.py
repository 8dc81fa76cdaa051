"""Measure how runs scale with cores, learners and devices, and compare their bits.

    python benchmarks/cores.py --csv docs/results/cores.csv
    python benchmarks/cores.py bits kills                   # two of the parts

workers     steps per second of PPO on HalfCheetah with one worker up to one per core
learners    the same with mujoco-ppo-wide, a worker per core, 1 to 8 learners, and one shard
shards      microseconds of a PPO minibatch in one process, by the number of gradient shards
driver      processor time that the driver needs to collect a step, with 2, 15 and 60 workers
worker      processor time of a worker for a step, and the part that the policy takes
engines     microseconds of a PPO minibatch, and updates per second of SAC, by engine
profile     microseconds of the parts of an update, with numpy alone and with the kernels
bits        whether 1, 2, 4 and 8 learners end with the same weights, for each algorithm
kills       whether a run ends with the same weights if learners are killed or stopped, or if the
            whole run is killed and resumed

The last two parts check results, so they may run on a busy machine. The script exits with code 1 if
a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from card import Learner, count_sac_updates, time_ppo, time_run
from idle import others, processor
from script import ended, positive, table

from rlflame.bench.case import make_env_case
from rlflame.bench.rollouts import RolloutRounds
from rlflame.fleet.inline import InlineFleet
from rlflame.fleet.local import LocalFleet
from rlflame.learning import torch_gradients
from rlflame.learning.kernels.library import VARIABLE
from rlflame.rollout import blas
from rlflame.rollout.machine import count_usable_cores
from rlflame.rollout.rollout import ActionSampler
from rlflame.storage.checkpoint import compute_state_digest, load
from rlflame.terminal_text import format_count
from rlflame.training.stop_signal import NullStop

COLUMNS = ["part", "case", "variant", "value", "unit", "processor", "cores", "card",
           "others_before"]  # fmt: skip
SIZES = (1, 2, 4, 8)
#: (hidden units, minibatch size) of PPO's updates.
PPO_CASES = ((64, 64), (64, 512), (256, 4096))
#: Small runs whose gradients several learners can share: two with one shard, eight with eight.
RUNS: dict[str, tuple[str, ...]] = {
    "PPO, HalfCheetah, 8 shards": (
        "--env", "halfcheetah", "--preset", "mujoco-ppo-wide", "--steps", "160000",
        "--set", "gradient_shards=8",
    ),
    "PPO, Hopper, one shard": ("--env", "hopper", "--steps", "80000"),
    "REINFORCE, CartPole, 8 shards": (
        "--env", "cartpole", "--algo", "reinforce", "--iterations", "100",
        "--set", "gradient_shards=8",
    ),
    "SAC, Pendulum, 8 shards": (
        "--env", "pendulum", "--algo", "sac", "--steps", "4000", "--set", "gradient_shards=8",
    ),
}  # fmt: skip
COMMON = ("--local", "--quiet", "--set", "evaluation.every_steps=none",
          "--set", "evaluation.final_episodes=1")  # fmt: skip
Result = tuple[str, str, float | str, str]


def main() -> int:
    parts: dict[str, Callable[[int], Iterator[Result]]] = {
        "workers": measure_workers, "learners": measure_learners, "shards": measure_shards,
        "driver": measure_driver, "worker": measure_worker, "engines": measure_engines,
        "profile": measure_profile,
        "bits": compare_learners, "kills": compare_kills,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--repeat", type=positive, default=3)
    parser.add_argument("--csv", type=table, help="CSV file, overwritten")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        print(*time_engine(options.engine, options.repeat), sep="\n")
        return 0
    card = torch_gradients.read_gpu_name() if torch_gradients.is_cuda_available() else ""
    facts = [processor(), str(count_usable_cores()), card]
    rows, failed = [], False
    for name in options.parts or parts:
        note = others()
        for case, variant, value, unit in parts[name](options.repeat):
            text = value if isinstance(value, str) else f"{value:.4g}"
            failed |= text == "different"
            print(f"{name:10s}{case:34s}{variant:38s}{text:>12s} {unit}", flush=True)
            rows.append([name, case, variant, text, unit, *facts, note])
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    return int(failed)


def measure_workers(repeat: int) -> Iterator[Result]:
    for preset, steps in (("mujoco-ppo", 300_000), ("mujoco-ppo-wide", 600_000)):
        for workers in list_counts():
            words = ("--preset", preset, "--workers", str(workers))
            yield from measure_run(preset, format_count(workers, "worker"), words, steps, repeat)


def measure_learners(repeat: int) -> Iterator[Result]:
    preset, cores = "mujoco-ppo-wide", count_usable_cores()
    for shards, sets, sizes in (
        ("four shards", (), SIZES),
        ("one shard", ("--set", "gradient_shards=1"), SIZES[:2]),
    ):
        for learners in (size for size in sizes if size <= cores):
            words = ("--preset", preset, "--workers", str(cores), *sets)
            words = (*words, "--learners", str(learners))
            case, variant = f"{preset}, {shards}", format_count(learners, "learner")
            yield from measure_run(case, variant, words, 600_000, repeat)


def measure_shards(repeat: int) -> Iterator[Result]:
    """Alternate between the numbers of shards, and yield the median times."""
    blas.set_threads(1)
    for env, size in (("halfcheetah", 512), ("halfcheetah", 64), ("cartpole", 512)):
        learners = {
            shards: Learner(
                env, "ppo", "numpy", f"ppo.minibatch_size={size}", f"gradient_shards={shards}",
                "network.hidden=[64,64]", "rollout.num_slots=1", "rollout.envs_per_slot=8",
                "rollout.steps=1024", "ppo.epochs=5", "ppo.target_kl=none",
            )
            for shards in SIZES
        }  # fmt: skip
        batch = learners[1].draw_batch()
        times: dict[int, list[float]] = {shards: [] for shards in SIZES}
        for _ in range(3 * repeat + 1):
            for shards, learner in learners.items():
                start = time.process_time()
                learner.algorithm.update(batch, 0.0)
                times[shards].append(time.process_time() - start)
        for shards, seconds in times.items():
            value = 1e6 * median(seconds[1:]) / (5 * 8192 / size)
            yield f"{env}, {size} samples", format_count(shards, "shard"), value, "us"


def measure_run(
    case: str, variant: str, words: tuple[str, ...], steps: int, repeat: int
) -> Iterator[Result]:
    runs = []
    for _ in range(repeat):
        time_run.cache_clear()
        runs.append(time_run(words, steps, "numpy"))
    for name, unit in (("steps_per_s", "steps/s"), ("learned_per_s", "steps/s, learning alone")):
        yield case, variant, median(run[name] for run in runs), unit


def measure_driver(repeat: int) -> Iterator[Result]:
    case, _ = make_env_case("halfcheetah", algorithm="ppo", preset="mujoco-ppo-wide", sets=())
    for workers in (2, 15, 60):
        with (
            LocalFleet(workers) as fleet,
            RolloutRounds(case, fleet, NullStop(), "sample") as rounds,
        ):
            rounds.warm_up()
            times = []
            for _ in range(3 * repeat):
                begun = time.process_time()
                steps = sum(int(fragment.lengths.sum()) for fragment in rounds.collect())
                times.append(1e6 * (time.process_time() - begun) / steps)
        yield "mujoco-ppo-wide", format_count(workers, "worker"), median(times), "us of a step"


def measure_worker(repeat: int) -> Iterator[Result]:
    """Yield the microseconds of a step, and those of the policy: noise, forward pass, densities."""
    case, _ = make_env_case("halfcheetah", algorithm="ppo", preset="mujoco-ppo-wide", sets=())
    act, spent = ActionSampler.act, [0.0]

    def time_act(sampler: ActionSampler, observations: Any, t: int) -> Any:
        start = time.thread_time()
        result = act(sampler, observations, t)
        spent[0] += time.thread_time() - start
        return result

    ActionSampler.act = time_act  # type: ignore[method-assign]
    try:
        with (
            InlineFleet() as fleet,
            RolloutRounds(case, fleet, NullStop(), "sample") as rounds,
        ):
            rounds.warm_up()
            times = []
            for _ in range(repeat):
                spent[0], start = 0.0, time.thread_time()
                steps = sum(int(fragment.lengths.sum()) for fragment in rounds.collect())
                times.append((time.thread_time() - start, spent[0], steps))
    finally:
        ActionSampler.act = act  # type: ignore[method-assign]
    elapsed_s, policy_s, steps = min(times)
    for name, seconds in (("whole step", elapsed_s), ("policy", policy_s)):
        yield "mujoco-ppo-wide", name, 1e6 * seconds / steps, "us of a step"


def list_counts() -> list[int]:
    """Return 1, 2, 4, ... and the number of cores."""
    cores = count_usable_cores()
    return sorted({2**power for power in range(cores.bit_length())} | {cores})


def measure_engines(repeat: int) -> Iterator[Result]:
    engines = {"numpy": "off", "numpy and kernels": "on", "device engine on the CPU": "cpu"}
    if torch_gradients.is_cuda_available():
        engines["device engine on the GPU"] = "cuda"
    for name, engine in engines.items():
        command = [sys.executable, __file__, "--engine", engine, "--repeat", str(repeat)]
        kernels = "off" if engine == "off" else "on"
        result = subprocess.run(command, check=True, capture_output=True, text=True,
                                env={**os.environ, VARIABLE: kernels})  # fmt: skip
        *times, rate = map(float, result.stdout.split())
        for (width, size), value in zip(PPO_CASES, times, strict=True):
            yield f"PPO, {width}x{width} units, {size:,} samples", name, value, "us"
        yield "SAC, mujoco-sac, HalfCheetah", name, rate, "updates/s"


def measure_profile(repeat: int) -> Iterator[Result]:
    """Divide the time of an update into parts, with numpy alone and with the kernels."""
    script = Path(__file__).with_name("update_profile.py")
    for name, kernels in (("numpy", "off"), ("numpy and kernels", "on")):
        result = subprocess.run([sys.executable, script], check=True, capture_output=True,
                                text=True, env={**os.environ, VARIABLE: kernels})  # fmt: skip
        for line in result.stdout.splitlines():
            case, part, value = line.split("\t")
            yield f"{case}: {part}", name, float(value), "us"


def time_engine(engine: str, repeat: int) -> Iterator[float]:
    """Yield the microseconds of PPO's minibatches, and the updates per second of SAC."""
    if engine == "cpu":
        torch_gradients.select_device = lambda kind, rank: "cpu"
    provider = "torch" if engine in ("cpu", "cuda") else "numpy"
    for width, size in PPO_CASES:
        yield 1e3 * min(time_ppo(provider, width, size, False) for _ in range(repeat))
    yield count_sac_updates(provider, False)


def compare_learners(repeat: int) -> Iterator[Result]:
    for name, words in RUNS.items():
        digests = []
        for size in SIZES if "8" in name else SIZES[:2]:
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                subprocess.run(make_command(words, run, size), check=True, capture_output=True)
                digests.append(read_digest(run))
                shared_count = json.loads((run / "machines.json").read_text())[-1]["shared_batches"]
            is_shared = size == 1 or shared_count > 0
            text = "equal" if digests[0] == digests[-1] and is_shared else "different"
            yield name, format_count(size, "learner"), text, digests[-1][:16]


def compare_kills(repeat: int) -> Iterator[Result]:
    words = (*RUNS["PPO, HalfCheetah, 8 shards"], "--set", "runtime.learner_deadline_s=2")
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        subprocess.run(make_command(words, whole, 1), check=True, capture_output=True)
        digest = read_digest(whole)
        for size in SIZES[1:]:
            for what, number in (("a learner is killed", signal.SIGKILL),
                                 ("a learner is stopped", signal.SIGSTOP),
                                 ("all are killed, then resumed", None)):  # fmt: skip
                run = Path(folder) / f"{size}-{what}"
                disturb(make_command(words, run, size), run, number)
                if number is None:
                    resume = [sys.executable, "-m", "rlflame", "resume", str(run), "--quiet"]
                    subprocess.run(resume, check=True, capture_output=True)
                is_equal = read_digest(run) == digest
                yield format_count(size, "learner"), what, "equal" if is_equal else "different", ""


def disturb(command: list[str], run: Path, number: signal.Signals | None) -> None:
    """Train, and send a signal to a learner in the second iteration, or kill the whole run."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    timing = run / "timing.jsonl"
    while process.poll() is None and (not timing.exists() or not timing.read_text()):
        time.sleep(0.01)
    time.sleep(0.1)
    learners = find_learners(process.pid)
    if process.poll() is not None or not learners:
        process.kill()
        raise RuntimeError("the run ended before a learner could be disturbed")
    if number is not None:
        os.kill(learners[-1], number)
        if process.wait():
            raise RuntimeError(f"the run failed with code {process.returncode}")
    else:
        for pid in (process.pid, *learners):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def find_learners(parent: int) -> list[int]:
    """Return the other learners of a run, which are children of its first process."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [
        int(pid)
        for pid in children
        if b"rlflame.experiment.learners.learner_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def make_command(words: tuple[str, ...], run: Path, learners: int) -> list[str]:
    return [sys.executable, "-m", "rlflame", "train", *words, *COMMON,
            "--learners", str(learners), "--out", str(run)]  # fmt: skip


def read_digest(run: Path) -> str:
    return compute_state_digest(load(run / "latest.safetensors"))


if __name__ == "__main__":
    sys.exit(ended(main))
