"""Check and time learning on a GPU, and print one table of all results.

    python benchmarks/card.py                       # at most eight minutes on a GPU with 16 cores
    python benchmarks/card.py --csv gpu.csv
    python benchmarks/card.py --device cpu --small  # every step of the script, without a GPU

The script checks that a learner has the same bits twice, that a restored learner continues in the
same bits, that SAC has the same bits with the replay on the device and in CPU memory, that a
captured update computes what it computes without a capture, and that weights are close to numpy's.
It times single updates with numpy on one thread and on the device, and whole runs of `rlflame
train`, without start-up, and kills and resumes a run. One recipe of each algorithm is checked
first, and the others after all measurements. A row that fails or hangs does not end the script, but
makes the exit code 1; later rows have a new process. Each row is written when it is complete.

The script uses the sources beside it, so rlflame need not be installed, but its dependencies must
be. Nothing is downloaded. Without a network, install the dependencies from a folder of wheels:

    python3 -m pip install --no-index --find-links wheels numpy torch "gymnasium[mujoco]" \\
        pydantic rich typer safetensors
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
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
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = str(Path(__file__).resolve().parent.parent / "src")
PACKAGES = ("numpy", "torch", "gymnasium", "mujoco", "imageio", "pydantic", "rich", "typer",
            "safetensors")  # fmt: skip
sys.path.insert(0, SOURCES)
if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
    sys.exit(f"These packages are not installed: {', '.join(missing)}.")
if tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) < (2, 6):
    sys.exit("rlflame needs torch 2.6 or later.")

import numpy as np  # noqa: E402
from idle import others, processor  # noqa: E402
from ppo_update import drawn  # noqa: E402
from row_process import RowProcess  # noqa: E402
from script import ended, table  # noqa: E402

from rlflame.config import resolve  # noqa: E402
from rlflame.config.flags import TrainFlags  # noqa: E402
from rlflame.experiment import components  # noqa: E402
from rlflame.learning import torch_gradients  # noqa: E402
from rlflame.learning.device.graph import UpdateGraph  # noqa: E402
from rlflame.learning.factory import keep_replay, make_algorithm, make_buffer  # noqa: E402
from rlflame.learning.kernels.library import is_disabled, is_missing  # noqa: E402
from rlflame.rollout import blas, machine  # noqa: E402
from rlflame.rollout.task import Fragment  # noqa: E402
from rlflame.storage import checkpoint  # noqa: E402

COLUMNS = ["what", "case", "result", "unit", "compared_with", "ratio", "processor", "card",
           "numpy", "others_before"]  # fmt: skip
#: The words in the place of a result that make the exit code 1.
FAILURES = "different", "failed", "out of time"
#: (hidden units, minibatch size) of PPO's updates.
PPO_CASES = ((64, 64), (64, 512), (256, 1024), (256, 4096))
ROUNDS = 5
#: Weights may differ this much from numpy's after one update and after an iteration, and this much
#: from the weights of updates that are not captured.
ONE_TOLERANCE, TOLERANCE, CAPTURE_TOLERANCE = 1e-5, 1e-3, 1e-6
#: Settings for comparisons with numpy. With its default of 1e-8, Adam would turn differences of
#: 1e-9 in a gradient that is nearly zero into differences of 1e-5 in a weight.
COMPARABLE = {"sac": ("sac.adam_epsilon=1e-5",), "reinforce": ("reinforce.adam_epsilon=1e-5",)}
#: On a GPU, no run starts or goes on after this many seconds.
LIMIT_S = 460.0
#: No check and no measurement of updates may take longer.
CALL_LIMIT_S = 120.0
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
FIRST_CHECKS = "PPO", "REINFORCE", "SAC"
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
    on_gpu = options.device == "cuda"
    options.end_s = time.monotonic() + (LIMIT_S if on_gpu else 3600.0)
    if on_gpu:
        torch_gradients.select_device("cuda", 0)
    process = RowProcess(partial(prepare, options.device))
    writer = None
    with ExitStack() as stack:
        stack.callback(process.close)
        facts = [processor(), process.call(torch_gradients.read_gpu_name, CALL_LIMIT_S)]
        facts += [find_kernels(), others(waits=not options.small)]
        print(f"{facts[0]}, {facts[1]}, {WORKERS + 1} cores, {facts[2]}", flush=True)
        if options.csv:
            file = stack.enter_context(options.csv.open("w", newline="", buffering=1))
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
        failed, verdicts = False, []
        for row in list_rows(options):
            result, base = measure(row, process, options.end_s)
            failed |= result in FAILURES or base in FAILURES
            is_compared = not isinstance(result, str) and isinstance(base, float)
            ratio = f"{result / base:.2f}" if is_compared else ""
            text, beside = map(format_result, (result, base))
            what, case, unit = row.what, row.case, "" if isinstance(result, str) else row.unit
            print(f"{what:26s}{case:34s}{text:>12s} {unit:12s}{beside:>10s} {ratio:>8s}",
                  flush=True)  # fmt: skip
            if writer is not None:
                writer.writerow([what, case, text, unit, beside, ratio, *facts])
            if (what, case) in TARGETS and not isinstance(result, str):
                target = TARGETS[what, case]
                verdict = "reached" if result >= target else "missed"
                verdicts.append(f"target {verdict}: {what}, {case}: {text} of {target:,.4g} {unit}")
    print("\n".join(verdicts))
    return int(failed)


class Row(NamedTuple):
    """A row of the table. Rows of whole runs start processes and do not use the GPU themselves."""

    what: str
    case: str
    unit: str
    measure: Callable[[], Any]
    #: The result that the row compares with.
    measure_base: Callable[[], float] | None = None
    is_run: bool = False


def measure(row: Row, process: RowProcess, end_s: float) -> tuple[Any, Any]:
    """Return the result of a row, and the result that it compares with, if any."""
    result = attempt(row.measure, row.is_run, process, end_s)
    if row.measure_base is None or result in FAILURES:
        return result, None
    return result, attempt(row.measure_base, row.is_run, process, end_s)


def attempt(work: Callable[[], Any], is_run: bool, process: RowProcess, end_s: float) -> Any:
    """Return the result of a function, or a word if it fails."""
    limit_s = min(CALL_LIMIT_S, end_s - time.monotonic())
    if limit_s <= 0.0:
        return "out of time"
    try:
        return work() if is_run else process.call(work, limit_s)
    except subprocess.TimeoutExpired:
        return "out of time"
    except Exception:
        traceback.print_exc()
        return "failed"


def format_result(result: float | str | None) -> str:
    return f"{result:,.4g}" if isinstance(result, float) else result or ""


def prepare(device: str) -> None:
    """Make the recipes of a GPU run on this device."""
    if device == "cpu":
        torch_gradients.select_device = lambda kind, rank: "cpu"
    else:
        torch_gradients.select_device("cuda", 0)


def find_kernels() -> str:
    return "numpy without kernels" if is_missing() or is_disabled() else "numpy with kernels"


def list_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield all rows, the most important ones first."""
    for name in FIRST_CHECKS:
        yield from list_checks(name, options.small)
    yield from list_updates(options.small)
    yield from list_runs(options)
    for name in CHECKS:
        if name not in FIRST_CHECKS:
            yield from list_checks(name, options.small)


def list_checks(name: str, small: bool) -> Iterator[Row]:
    """Yield the checks of bits and of closeness to numpy for a recipe."""
    case = CHECKS[name]
    if small:
        case = (*case, *SMALL_CHECKS.get(case[1], ()))
    yield Row("same bits twice", name, "", partial(compare_twice, *case))
    yield Row("same bits after resume", name, "", partial(compare_resumed, *case))
    yield Row("captured and not", name, "max diff", partial(compare_with_eager, *case))
    for text, one in (("beside numpy, one update", True), ("beside numpy", False)):
        yield Row(text, name, "max diff", partial(compare_with_numpy, *case, one=one))
    if case[1] == "sac":
        yield Row("same bits in CPU memory", name, "", partial(compare_replays, *case))


def list_updates(small: bool) -> Iterator[Row]:
    """Yield the times of single updates on the device, beside numpy on one thread."""
    for width, size in PPO_CASES[: 1 if small else None]:
        text = f"{width}x{width} units, {size} samples"
        yield Row("PPO update", text, "x numpy", partial(compare_ppo_speed, width, size, small))
    for text, on_device in (("HalfCheetah, mujoco-sac", True), ("replay in CPU memory", False)):
        yield Row(
            "SAC updates", text, "updates/s", partial(count_sac_updates, "torch", small, on_device),
            partial(count_sac_updates, "numpy", small),
        )  # fmt: skip


#: For each kind of whole run: the options, and the steps on the device and with numpy.
WORKERS = max(1, machine.count_usable_cores() - 1)
WIDE = ("--preset", "mujoco-ppo-wide", "--workers", str(WORKERS))
RUNS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "PPO wide": (WIDE, 3_000_000, 1_000_000),
    "SAC": (
        ("--algo", "sac", "--workers", "4", "--set", "sac.learning_starts=1000"), 60_000, 9_000,
    ),
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


def list_runs(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the speed of whole runs and of learning alone, and a kill and a resume."""
    for what, (words, steps, numpy_steps) in RUNS.items():
        if options.small:
            words = (*words, *SMALL_RUN, *(SMALL_SAC_RUN if what == "SAC" else ()))
            steps = numpy_steps = 300 if what == "SAC" else 2_000
        for part, name in (("steps_per_s", "whole run"), ("learned_per_s", "learning alone")):
            runs = (
                partial(read_speed, part, words, count, device, options.end_s)
                for device, count in ((options.device, steps), ("numpy", numpy_steps))
            )
            yield Row(f"{name}, steps/s", what, "steps/s", *runs, is_run=True)
    work = partial(compare_killed, options.small, options.device, options.end_s)
    yield Row("same bits after kill -9", "PPO, whole run", "", work, is_run=True)


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
    sets = (*sets, *COMPARABLE.get(name, ()))
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


def compare_ppo_speed(width: int, size: int, small: bool) -> float:
    return time_ppo("numpy", width, size, small) / time_ppo("torch", width, size, small)


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


def compare_killed(small: bool, device: str, end_s: float) -> str:
    """Compare a run with one that is killed after its first checkpoint and resumed."""
    train = [
        "train",
        "--env",
        "halfcheetah",
        "--local",
        "--quiet",
        "--steps",
        "12000" if small else "80000",
        "--set",
        "runtime.checkpoint_every_steps=4000",
        "--set",
        "evaluation.every_steps=none",
        "--set",
        "evaluation.final_episodes=1",
        *(("--set", "ppo.epochs=2") if small else ()),
    ]
    with tempfile.TemporaryDirectory() as folder:
        whole, other = Path(folder) / "whole", Path(folder) / "killed"
        run_command(make_command(device, *train, "--out", str(whole)), end_s)
        command = make_command(device, *train, "--out", str(other))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=make_environment())
        try:
            while process.poll() is None and not (other / "latest.safetensors").exists():
                if time.monotonic() > end_s:
                    raise subprocess.TimeoutExpired(command, LIMIT_S)
                time.sleep(0.01)
            if process.poll() is not None:
                raise RuntimeError("the run ended before it could be killed")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        words = ["resume", str(other), "--local", "--quiet"]
        command = make_command(device, *words)[:-2]  # a run keeps its device
        run_command(command, end_s)
        files = [run / "latest.safetensors" for run in (whole, other)]
        digests = {checkpoint.load(file).digest for file in files}
    return "equal" if len(digests) == 1 else "different"


def read_speed(part: str, *run: Any) -> float:
    return time_run(*run)[part]


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
