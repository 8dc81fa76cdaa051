"""Measure the overhead of Flame on the cluster that FLAME_ENDPOINT names.

    python benchmarks/flame_overhead.py                        # all measurements
    python benchmarks/flame_overhead.py fragments iteration    # two of them

cold        seconds from opening the fleet to the first fragment
fragments   milliseconds per empty fragment of 100 kB, with 20 fragments in flight
iteration   milliseconds for 8 fragments of 100 kB and 0.8 MB of new weights, compared with flamepy
executors   efficiency and rate of 20 and 64 executors with fragments that take 1, 10, 100 and
            1000 ms
flat        contents of the object cache and memory of all processes during 1,000 iterations
reinforce   episodes per second of REINFORCE on Hopper; with --example DIR, compared with Flame's
            own example
wide        steps per second of mujoco-ppo-wide on HalfCheetah with two learners, on as many
            executors and local workers as there are cores

Run this script on an otherwise idle machine. Times of several rounds are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from script import ended, positive

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from rlflame.config.runtime import RuntimeSettings  # noqa: E402
from rlflame.fleet.flame.client import FlameClient  # noqa: E402
from rlflame.fleet.flame.fleet import FlameFleet  # noqa: E402
from rlflame.rollout.envs.make import read_env_spec  # noqa: E402
from rlflame.rollout.policy import compute_array_shapes  # noqa: E402
from rlflame.rollout.task import (  # noqa: E402
    PolicyArrays,
    PolicySpec,
    RolloutTask,
    make_fresh_state,
)

FILE = str(HERE / "sleeper.py")


def main() -> None:
    measures: dict[str, Callable[[argparse.Namespace], None]] = {
        "cold": cold, "fragments": fragments, "iteration": iteration,
        "executors": executors, "flat": flat, "reinforce": reinforce, "wide": wide,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[*measures, []], default=[])
    parser.add_argument("--iterations", type=positive, default=1000, help="iterations of `flat`")
    parser.add_argument("--executors", type=positive, nargs="+", default=[20, 64], metavar="N")
    parser.add_argument("--example", type=Path, help="folder of Flame's example")
    options = parser.parse_args()
    for name in options.what or measures:
        measures[name](options)


def fleet(most: int, **wishes: Any) -> FlameFleet:
    return FlameFleet(None, RuntimeSettings(workers=most, env_file=FILE, flame=wishes))


def tasks(count: int, seconds: float = 0.0, hidden: tuple[int, ...] = (8,)) -> list[RolloutTask]:
    """Make tasks that return 100 kB (10 steps of 2,500 numbers) and compute little."""
    given = {"seconds": seconds, "every": 10, "size": 2_500}
    env = read_env_spec("sleeper:Sleeper-v0", given, None, ("sleeper",))
    policy = PolicySpec(
        action_kind=env.action_kind, observation_size=env.observation_size,
        action_size=env.action_size, action_low=env.action_low, action_high=env.action_high,
        hidden=hidden, activation="tanh", normalise=False, observation_clip=10.0, width=8,
    )  # fmt: skip
    return [
        RolloutTask(
            run="bench", seed=0, purpose="train", iteration=0, slot=slot, env=env, policy=policy,
            policy_id="", unit="steps", steps=10, rows=1, first_row=0, acting="sample",
            record=True, states=(make_fresh_state(0, slot),),
        )
        for slot in range(count)
    ]  # fmt: skip


def weights(spec: PolicySpec, seed: int = 0) -> PolicyArrays:
    generator = np.random.default_rng(seed)
    return {
        name: generator.normal(0.0, 0.1, shape).astype(np.float32)
        for name, shape in compute_array_shapes(spec).items()
    }


def once(opened: FlameFleet, wanted: list[RolloutTask], seed: int) -> float:
    """Return the seconds from publishing new weights to the last fragment."""
    fresh = weights(wanted[0].policy, seed)
    began = time.perf_counter()
    name = opened.put(fresh)
    submission = opened.submit([dataclasses.replace(task, policy_id=name) for task in wanted])
    opened.release(name)
    for _ in submission:
        pass
    return time.perf_counter() - began


def middle(values: list[float]) -> str:
    return (
        f"{statistics.median(values):.1f} (from {min(values):.1f} to {max(values):.1f}, "
        f"{len(values)} rounds)"
    )


def cold(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    with fleet(1) as opened:
        once(opened, tasks(1), 0)
        print(f"cold: {time.perf_counter() - began:.1f} s to the first fragment")


def fragments(options: argparse.Namespace) -> None:
    with fleet(2) as opened:
        once(opened, tasks(20), 0)
        begun = len(opened._scheduler.statistics.busy_s)
        rounds = [once(opened, tasks(20), seed) for seed in range(1, 31)]
        busy = list(opened._scheduler.statistics.busy_s)[begun:]
    each = [1000.0 * seconds / 20 for seconds in rounds]
    inside = 1000.0 * statistics.median(busy)
    print(f"fragments: {middle(each)} ms each with 20 in flight; {inside:.1f} ms of it in the "
          f"environment's process, on {opened.capacity} executors")  # fmt: skip


#: 2,500 x 80 float32 weights are 0.8 MB.
WIDE = (80,)


def iteration(options: argparse.Namespace) -> None:
    wanted = tasks(8, hidden=WIDE)
    size = sum(array.nbytes for array in weights(wanted[0].policy).values())
    with fleet(2) as opened:
        once(opened, wanted, 0)
        begun = len(opened._scheduler.statistics.busy_s)
        ours = [1000.0 * once(opened, wanted, seed) for seed in range(1, 21)]
        inside = 1000.0 * statistics.median(list(opened._scheduler.statistics.busy_s)[begun:])
    print(
        f"iteration: {middle(ours)} ms for 8 fragments with {size / 1e6:.1f} MB of new weights; "
        f"{inside:.1f} ms of each fragment is its environment's process, policy included"
    )
    theirs = plain_runner(weights(wanted[0].policy))
    print(f"iteration: {middle(theirs)} ms by flamepy's Runner with the same sizes")


def plain_runner(arrays: PolicyArrays) -> list[float]:
    """Move the same data with flamepy alone: store weights, call tasks, get results."""
    from flamepy.runner import Runner

    before = os.getcwd()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with Runner("plain-overhead", dependencies=["numpy"]) as runner:

                def work(given: Any) -> Any:
                    import numpy

                    return {"observations": numpy.ones(25_000, numpy.float32), "n": len(given)}

                service = runner.service(work)
                runner.get([service(runner.put_object(dict(arrays))) for _ in range(2)])
                for _ in range(10):
                    began = time.perf_counter()
                    reference = runner.put_object(dict(arrays))
                    runner.get([service(reference) for _ in range(8)])
                    found.append(1000.0 * (time.perf_counter() - began))
        finally:
            os.chdir(before)
    return found


def executors(options: argparse.Namespace) -> None:
    """Print the rate and the efficiency of executors whose fragments mostly sleep."""
    for number in options.executors:
        measure_executors(number)


def measure_executors(number: int) -> None:
    # Flame v0.6.0 starts more executors than a session asks for if the nodes have room for them.
    with fleet(number, cpu=0, memory=f"{read_memory_mb() // number}m") as opened:
        deadline = time.monotonic() + 240.0
        while len(opened.probe()) < number and time.monotonic() < deadline:
            once(opened, tasks(2 * number, 0.2), 0)
        print(f"executors: {len(opened.probe())} of {number} have answered, "
              f"{count_executors(opened)} are bound", flush=True)  # fmt: skip
        for milliseconds, rounds in ((1, 40), (10, 40), (100, 16), (1000, 16)):
            count = rounds * number
            once(opened, tasks(2 * number, milliseconds / 1000.0), 1)
            results = []
            for seed in (2, 3, 4):
                begun = time.process_time()
                seconds = once(opened, tasks(count, milliseconds / 1000.0), seed)
                results.append((seconds, time.process_time() - begun))
            seconds, busy = min(results)
            ideal = count * milliseconds / 1000.0 / number
            print(f"executors: {number}, {count} fragments of {milliseconds} ms: {seconds:.2f} s, "
                  f"ideal {ideal:.2f} s: efficiency {ideal / seconds:.2f}, {count / seconds:.0f} "
                  f"fragments/s, {1e3 * busy / count:.2f} ms of the driver's processor time each",
                  flush=True)  # fmt: skip


def read_memory_mb() -> int:
    """Return the memory that the node offers to executors."""
    with contextlib.closing(FlameClient().open()) as client:
        (node,) = client.call("list_nodes")
        return int(node.status.capacity.memory) >> 20


def count_executors(opened: FlameFleet) -> int:
    session = opened._starter.session
    assert session is not None
    executors = opened._client.call("list_executors")
    return sum(item.status.session_id == session.session.id for item in executors)


def flat(options: argparse.Namespace) -> None:
    from flamepy.core import cache

    wanted = tasks(4)
    with fleet(2) as opened:
        for number in range(options.iterations + 1):
            once(opened, wanted, number)
            if number in (100, options.iterations // 2, options.iterations):
                workers = {int(worker["pid"]) for worker in opened.probe()}
                children = {int(worker["child"]) for worker in opened.probe()}
                held = sum(map(resident, workers)), sum(map(resident, children))
                print(f"flat: iteration {number}: driver {resident(os.getpid()):.0f} MB, "
                      f"services {held[0]:.0f} MB, children {held[1]:.0f} MB, "
                      f"{len(cache._object_cache)} objects kept by the driver")  # fmt: skip
                stored(opened._application)


def resident(pid: int) -> float:
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
    return float(shown.stdout or 0.0) / 1000.0


def stored(application: str) -> None:
    """Print the size of this run's objects, if FLAME_CACHE_FOLDER names the cache."""
    folder = os.environ.get("FLAME_CACHE_FOLDER")
    if folder:
        found = [path for path in Path(folder).rglob("*") if path.is_file()]
        ours = [path for path in found if application in str(path)]
        size = sum(path.stat().st_size for path in ours) / 1e6
        print(f"flat: the cache holds {len(ours)} objects of this run, {size:.2f} MB")


def reinforce(options: argparse.Namespace) -> None:
    """Run 31 iterations of 50 episodes on both sides, and time all but the first.

    rlflame runs twice. With the preset's learning rate, the policy improves and the episodes become
    longer. With a learning rate of almost 0, the episodes stay as short as those of an untrained
    policy.
    """
    rates = {}
    for name, sets in (("learning", ()), ("standing still", ("reinforce.learning_rate=1e-9",))):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "rlflame", "train", "--env", "hopper", "--algo",
                       "reinforce", "--fleet", "flame", "--iterations", str(ITERATIONS),
                       "--episodes-per-iter", "50", "--set", "envs_per_slot=25", "--set",
                       "evaluation.final_episodes=1", "--out", f"{folder}/run", "--plain",
                       *(word for one in sets for word in ("--set", one))]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True)
            rates[name], steps = own_rate(Path(folder) / "run")
        print(f"reinforce: {rates[name]:.1f} episodes/s by rlflame, {name}: {steps:.0f} steps "
              "an episode", flush=True)  # fmt: skip
    if options.example is not None:
        theirs = example(options.example)
        print(f"reinforce: {theirs:.1f} episodes/s by Flame's example: "
              + ", ".join(f"{ours / theirs:.1f} times {name}" for name, ours in rates.items())
              )  # fmt: skip


#: Flame's example prints a line after iterations 0, 10, 20 and 30.
ITERATIONS = 31


def example(source: Path) -> float:
    """Return the episodes per second of Flame's example, from its first to last line."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("main.py", "model.py", "pyproject.toml"):
            (Path(folder) / name).write_bytes((source / name).read_bytes())
        command = [sys.executable, "-u", "main.py", "--env", "hopper", "--iterations",
                   str(ITERATIONS), "--episodes-per-iter", "50"]  # fmt: skip
        said = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert said.stdout is not None
        heard = [time.monotonic() for line in said.stdout if re.match(r"Iteration +[0-9]+ ", line)]
        said.wait()
    assert len(heard) == 4, "the example does not print what it prints in v0.6.0"
    return (ITERATIONS - 1) * 50 / (heard[-1] - heard[0])


def own_rate(folder: Path) -> tuple[float, float]:
    """Return episodes per second and their mean length, without the first iteration."""
    lines = [json.loads(line) for line in (folder / "timing.jsonl").open()]
    spent = [line["wall_s"] for line in lines if "closing" not in line]
    with (folder / "episodes.csv").open(newline="") as file:
        lengths = [float(row["l"]) for row in csv.DictReader(file)][50:]
    return (len(spent) - 1) * 50 / sum(spent[1:]), statistics.mean(lengths)


def wide(options: argparse.Namespace) -> None:
    """Run both fleets alternately, and time all iterations but the first."""
    cores = len(os.sched_getaffinity(0))
    rates: dict[str, list[float]] = {"flame": [], "local": []}
    policies = set()
    for _ in range(3):
        for fleet_name, found in rates.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "rlflame", "train", "--env", "halfcheetah",
                           "--preset", "mujoco-ppo-wide", "--steps", "500000", "--fleet",
                           fleet_name, "--workers", str(cores), "--learners", "2", "--set",
                           "evaluation.final_episodes=1", "--out", f"{folder}/run",
                           "--plain"]  # fmt: skip
                subprocess.run(command, check=True, capture_output=True)
                run = Path(folder) / "run"
                lines = [json.loads(line) for line in (run / "timing.jsonl").open()]
                spent = [line["wall_s"] for line in lines if "closing" not in line][1:]
                found.append(len(spent) * 32_768 / sum(spent))
                policies.add((run / "result.json").read_text())
        print("wide: " + ", ".join(f"{name} {found[-1]:.0f}" for name, found in rates.items())
              + " steps/s", flush=True)  # fmt: skip
    flame, local = (statistics.median(found) for found in rates.values())
    print(f"wide: medians: {flame:.0f} steps/s on Flame, {local:.0f} with local workers "
          f"({flame / local:.2f}); {len(policies)} different policies")  # fmt: skip


if __name__ == "__main__":
    ended(main)
