"""Check and time learning on a GPU, and print one table of all results.

    python benchmarks/card.py                       # at most eight minutes on a GPU with 16 cores
    python benchmarks/card.py --csv gpu.csv
    python benchmarks/card.py --device cpu --small  # every step of the script, without a GPU

The script first checks that a learner has the same bits twice, that a restored learner continues in
the same bits, that SAC has the same bits with the replay on the device and in CPU memory, that a
captured update computes what it computes without a capture, and that weights are close to numpy's.
Then it times single updates with numpy on one thread and on the device. At the end it trains whole
runs through `rlflame train`, kills and resumes one of them, and reports updates and steps per
second without start-up. A failed check does not end the script, but makes the exit code 1.

The script uses the sources beside it, so rlflame need not be installed, but its dependencies must
be. Nothing is downloaded. Without a network, install the dependencies from a folder of wheels:

    pip install --no-index --find-links wheels numpy torch gymnasium mujoco pydantic rich typer \\
        safetensors
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import signal
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

SOURCES = str(Path(__file__).resolve().parent.parent / "src")
PACKAGES = ("numpy", "torch", "gymnasium", "mujoco", "pydantic", "rich", "typer", "safetensors")
sys.path.insert(0, SOURCES)
if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
    sys.exit(f"These packages are not installed: {', '.join(missing)}.")

import numpy as np  # noqa: E402
from idle import others, processor  # noqa: E402
from ppo_update import drawn  # noqa: E402
from script import ended, table  # noqa: E402

from rlflame.config import resolve  # noqa: E402
from rlflame.config.flags import TrainFlags  # noqa: E402
from rlflame.experiment import components  # noqa: E402
from rlflame.learning import torch_gradients  # noqa: E402
from rlflame.learning.device.graph import UpdateGraph  # noqa: E402
from rlflame.learning.factory import keep_replay, make_algorithm, make_buffer  # noqa: E402
from rlflame.rollout import blas  # noqa: E402
from rlflame.rollout.task import Fragment  # noqa: E402
from rlflame.storage import checkpoint  # noqa: E402

COLUMNS = ["what", "case", "result", "unit", "compared_with", "ratio", "processor", "card",
           "others_before"]  # fmt: skip
#: (hidden units, minibatch size) of PPO's updates.
PPO_CASES = ((64, 64), (64, 512), (256, 1024), (256, 4096))
ROUNDS = 5
#: Weights may differ this much from numpy's after one update and after an iteration, and this much
#: from the weights of updates that are not captured.
ONE_TOLERANCE, TOLERANCE, CAPTURE_TOLERANCE = 1e-5, 1e-3, 1e-6
#: On a GPU, no run starts or goes on after this many seconds.
LIMIT_S = 460.0
#: The results to reach with one H200 and 16 cores, by row. The last one is a ratio.
TARGETS = {
    ("SAC updates", "HalfCheetah, mujoco-sac"): 1_500.0,
    ("whole run, steps/s", "PPO wide"): 150_000.0,
    ("PPO update", "256x256 units, 4096 samples"): 10.0,
}
#: Runs the command-line tool with the CPU in the place of a GPU.
ON_CPU = """
import sys
from rlflame.learning import torch_gradients
torch_gradients.is_cuda_available = lambda: True
torch_gradients.select_device = lambda kind, rank: "cpu"
torch_gradients.read_gpu_name = lambda: "the CPU"
from rlflame.__main__ import main
sys.argv[0] = "rlflame"
main()
"""
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
    "PPO, episodes": ("halfcheetah", "ppo", "rollout.unit=episodes", "rollout.steps=200"),
    "REINFORCE": ("cartpole", "reinforce", "rollout.steps=200", "reinforce.entropy_weight=0.01"),
    "SAC": ("halfcheetah", "sac"),
    "SAC, delays": ("halfcheetah", "sac", "sac.policy_delay=2", "sac.target_update_interval=7",
                    "sac.max_gradient_norm=1.0", "network.normalise_observations=true"),
    "SAC, n-step returns": ("halfcheetah", "sac", "sac.n_step=3"),
    "SAC, gSDE": ("halfcheetah", "sac", GSDE),
    "SAC, quantiles": ("halfcheetah", "sac", "sac.quantiles=25", "sac.dropped_quantiles=2"),
    "SAC, normalised critics": ("halfcheetah", "sac", "sac.critic_norm=batch"),
}  # fmt: skip
#: What --small adds to these settings, by algorithm.
SMALL_CHECKS = {
    "ppo": ("ppo.epochs=2", "rollout.num_slots=3"),
    "sac": ("network.hidden=[32,32]", "sac.batch_size=32"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a few updates of everything")
    parser.add_argument("--csv", type=table, help="CSV file, overwritten")
    options = parser.parse_args()
    options.end_s = time.monotonic() + (LIMIT_S if options.device == "cuda" else 3600.0)
    if options.device == "cpu":
        # The recipe is that of a GPU, and its code runs eagerly on the CPU.
        torch_gradients.select_device = lambda kind, rank: "cpu"
    else:
        torch_gradients.select_device("cuda", 0)
    facts = [processor(), torch_gradients.read_gpu_name(), others(waits=not options.small)]
    print(f"{facts[0]}, {facts[1]}, {os.cpu_count()} cores", flush=True)
    rows, verdicts, failed = [], [], False
    for part in (list_checks, list_updates, list_runs):
        for what, case, measure in part(options):
            try:
                if time.monotonic() > options.end_s:
                    raise subprocess.TimeoutExpired(what, LIMIT_S)
                result, unit, base = measure()
            except subprocess.TimeoutExpired:
                result, unit, base = "out of time", "", None
            except Exception:
                traceback.print_exc()
                result, unit, base = "failed", "", None
            failed |= result in ("failed", "different", "out of time")
            ratio = f"{result / base:.2f}" if base else ""
            text = result if isinstance(result, str) else f"{result:,.4g}"
            beside = "" if base is None else f"{base:,.4g}"
            print(f"{what:24s}{case:34s}{text:>12s} {unit:12s}{beside:>10s} {ratio:>8s}",
                  flush=True)  # fmt: skip
            rows.append([what, case, text, unit, beside, ratio, *facts])
            if (what, case) in TARGETS and not isinstance(result, str):
                target = TARGETS[what, case]
                verdict = "reached" if result >= target else "missed"
                verdicts.append(f"target {verdict}: {what}, {case}: {text} of {target:,.4g} {unit}")
    print("\n".join(verdicts))
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    return int(failed)


Measurement = tuple[str, str, Callable[[], tuple[Any, str, float | None]]]


def list_checks(options: argparse.Namespace) -> Iterator[Measurement]:
    """Yield the checks of bits and of closeness to numpy."""
    for name, case in CHECKS.items():
        if options.small:
            case = (*case, *SMALL_CHECKS.get(case[1], ()))
        yield "same bits twice", name, lambda case=case: (compare_twice(*case), "", None)
        yield "same bits after resume", name, lambda case=case: (compare_resumed(*case), "", None)
        yield "captured and not", name, lambda case=case: (
            compare_with_eager(*case), "max diff", None,
        )  # fmt: skip
        for text, one in (("beside numpy, one update", True), ("beside numpy", False)):
            yield text, name, lambda case=case, one=one: (
                compare_with_numpy(*case, one=one), "max diff", None,
            )  # fmt: skip
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


#: For each kind of whole run: the options, and the steps on the device and with numpy.
WORKERS = str(max(1, (os.cpu_count() or 1) - 1))
WIDE = ("--preset", "mujoco-ppo-wide", "--workers", WORKERS)
RUNS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "SAC": (
        ("--algo", "sac", "--workers", "4", "--set", "sac.learning_starts=1000"), 60_000, 9_000,
    ),
    "PPO wide": (WIDE, 3_000_000, 1_000_000),
    "PPO 256x256, 4096": (
        (*WIDE, "--set", "ppo.minibatch_size=4096", "--set", "network.hidden=[256,256]"),
        1_000_000, 200_000,
    ),
}  # fmt: skip

#: What --small adds to the options of each run, and of runs with SAC.
SMALL_RUN = ("--workers", "1", "--set", "rollout.steps=2")
SMALL_SAC_RUN = (
    "--set", "sac.learning_starts=100", "--set", "network.hidden=[32,32]",
    "--set", "sac.batch_size=32",
)  # fmt: skip


def list_runs(options: argparse.Namespace) -> Iterator[Measurement]:
    """Yield a kill and a resume, the speed of whole runs, and the speed of learning alone."""
    yield "same bits after kill -9", "PPO, whole run", lambda: (compare_killed(options), "", None)
    for what, (words, steps, numpy_steps) in RUNS.items():
        if options.small:
            words = (*words, *SMALL_RUN, *(SMALL_SAC_RUN if what == "SAC" else ()))
            steps = numpy_steps = 300 if what == "SAC" else 2_000
        for part, name in (("steps_per_s", "whole run"), ("learned_per_s", "learning alone")):
            yield f"{name}, steps/s", what, lambda w=words, n=steps, m=numpy_steps, p=part: (
                time_run(w, n, options.device, options.end_s)[p], "steps/s",
                time_run(w, m, "numpy", options.end_s)[p],
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

    def learn(self, number: int, progress: float = 0.0, most: int | None = None) -> float:
        """Learn from random numbers; return the number of updates so far.

        The numbers depend only on the number of the iteration. With a replay, make at most `most`
        updates.
        """
        rollout, updates = self.learning.rollout, 0.0
        if self.learning.replay is None:
            return self.algorithm.update(self.draw_batch(), progress)["n_updates"]
        self.buffer.add([draw_fragment(number, rollout.steps, rollout.columns, self.spec)], {})
        for batch in self.buffer.take_batches():
            limited = replace(batch, updates=min(batch.updates, most or batch.updates))
            updates = self.algorithm.update(limited, progress)["n_updates"]
        return updates

    def read_weights(self) -> Any:
        state = self.algorithm.get_state()
        names = ("parameters", "actor", "critics")
        return np.concatenate([state[name] for name in names if name in state])

    def draw_batch(self) -> Any:
        """Return a batch for PPO or REINFORCE."""
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


def compare_with_eager(env: str, name: str, *sets: str) -> float | str:
    """Return the largest difference of a weight between captured updates and plain ones."""
    captured, eager = (make(env, name, "torch", *sets) for _ in range(2))
    captured.learn(0)
    run = UpdateGraph.run
    UpdateGraph.run = lambda self, function, state: function()  # type: ignore[method-assign]
    try:
        eager.learn(0)
    finally:
        UpdateGraph.run = run  # type: ignore[method-assign]
    return measure_difference(captured.read_weights(), eager.read_weights(), CAPTURE_TOLERANCE)


def compare_with_numpy(env: str, name: str, *sets: str, one: bool) -> float | str:
    """Return the largest difference of a weight after one update or one iteration."""
    if name == "ppo":
        sets = (*sets, "ppo.epochs=2", "rollout.num_slots=1")
        if one:
            sets = (*sets, "ppo.epochs=1", "ppo.minibatch_size=100000", "ppo.target_kl=none")
    learners = [make(env, name, provider, *sets) for provider in ("torch", "numpy")]
    before = learners[0].read_weights()
    counts = [learner.learn(0, most=1 if one else None) for learner in learners]
    weights = [learner.read_weights() for learner in learners]
    if counts[0] != counts[1] or (one and counts[0] != 1) or np.array_equal(before, weights[0]):
        return "different"
    return measure_difference(*weights, ONE_TOLERANCE if one else TOLERANCE)


def measure_difference(first: Any, second: Any, tolerance: float) -> float | str:
    difference = float(np.abs(first - second).max())
    is_close = bool(np.isfinite(first).all()) and difference < tolerance
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


def make_command(device: str, *words: str) -> list[str]:
    """Return a command of rlflame; on the device `cpu`, the CPU takes the place of a GPU."""
    words = (*words, "--device", "cpu" if device == "numpy" else "cuda")
    start = ["-c", ON_CPU] if device == "cpu" else ["-m", "rlflame"]
    return [sys.executable, *start, *words]


def make_environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")]),
    }


def run_command(command: list[str], end_s: float | None) -> None:
    timeout = None if end_s is None else max(1.0, end_s - time.monotonic())
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=make_environment(), timeout=timeout
    )


def compare_killed(options: argparse.Namespace) -> str:
    """Compare a run with one that is killed after its first checkpoint and resumed."""
    train = [
        "train",
        "--env",
        "halfcheetah",
        "--local",
        "--quiet",
        "--steps",
        "12000" if options.small else "80000",
        "--set",
        "runtime.checkpoint_every_steps=4000",
        "--set",
        "evaluation.every_steps=none",
        "--set",
        "evaluation.final_episodes=1",
        *(("--set", "ppo.epochs=2") if options.small else ()),
    ]
    with tempfile.TemporaryDirectory() as folder:
        whole, other = Path(folder) / "whole", Path(folder) / "killed"
        run_command(make_command(options.device, *train, "--out", str(whole)), options.end_s)
        command = make_command(options.device, *train, "--out", str(other))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=make_environment())
        try:
            while process.poll() is None and not (other / "latest.safetensors").exists():
                if time.monotonic() > options.end_s:
                    raise subprocess.TimeoutExpired(command, LIMIT_S)
                time.sleep(0.01)
            if process.poll() is not None:
                raise RuntimeError("the run ended before it could be killed")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        words = ["resume", str(other), "--local", "--quiet"]
        command = make_command(options.device, *words)[:-2]  # a run keeps its device
        run_command(command, options.end_s)
        files = [run / "latest.safetensors" for run in (whole, other)]
        digests = {checkpoint.load(file).digest for file in files}
    return "equal" if len(digests) == 1 else "different"


@cache
def time_run(
    words: tuple[str, ...], steps: int, device: str, end_s: float | None = None
) -> dict[str, float]:
    """Train, and return speeds in the last two thirds of the run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run_command(
            make_command(
                device, "train", "--env", "halfcheetah", *words, "--steps", str(steps), "--local",
                "--quiet", "--set", "evaluation.every_steps=none", "--set",
                "evaluation.final_episodes=1", "--out", str(run),
            ), end_s,
        )  # fmt: skip
        lines = [json.loads(line) for line in (run / "timing.jsonl").open()]
        learning = checkpoint.load(run / "latest.safetensors").recipe.learning
    if learning.stays_on_device != (device != "numpy"):
        raise RuntimeError("the run did not learn on the device")
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
