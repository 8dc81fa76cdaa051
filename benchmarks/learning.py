"""Train presets over several seeds and say what they reached: a CSV, IQM and interval.

    python benchmarks/learning.py floors                 # the learning floors, 5 seeds each
    python benchmarks/learning.py reinforce              # default against classic, equal steps
    python benchmarks/learning.py sac --seeds 0-2 --csv docs/results/sac.csv
    python benchmarks/learning.py run hopper ppo --steps 300000 --seeds 100-102 \
        --set ppo.minibatch_size=256

Each seed is one process with an inline fleet, as many side by side as --jobs says. Finished
seeds are kept in the CSV and not run again, so a study can be stopped and taken up later.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

COLUMNS = ["study", "env", "algo", "preset", "seed", "step", "return_mean", "return_std",
           "episodes", "train_seconds", "final", "exploring_return"]  # fmt: skip


@dataclass(frozen=True)
class Study:
    """One row of a table: a preset on an environment for a number of steps."""

    name: str
    env: str
    algo: str
    steps: int
    floor: float | None = None
    preset: str | None = None
    sets: tuple[str, ...] = ()


FLOORS = [
    Study("ppo-cartpole-100k", "cartpole", "ppo", 100_000, 475),
    Study("ppo-pendulum-100k", "pendulum", "ppo", 100_000, -250),
    Study("reinforce-cartpole-500k", "cartpole", "reinforce", 500_000, 475),
    Study("ppo-hopper-1m", "hopper", "ppo", 1_000_000, 2000),
    Study("ppo-halfcheetah-1m", "halfcheetah", "ppo", 1_000_000, 2000),
]
REINFORCE = [
    Study(f"{kind}-{env}", env, "reinforce", steps, preset=preset)
    for env, steps in (("cartpole", 200_000), ("hopper", 300_000), ("ant", 300_000))
    for kind, preset in (("default", None), ("classic", "reinforce-classic"))
]
SAC = [
    Study("sac-pendulum-20k", "pendulum", "sac", 20_000, -160),
    *(
        Study(f"sac-{env}-300k", env, "sac", 300_000, floor, sets=("learning.threads=1",))
        for env, floor in (("hopper", 2500), ("halfcheetah", 7000))
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["floors", "reinforce", "sac", "run", "one"])
    parser.add_argument("rest", nargs="*", help="for run: ENV ALGO; else the studies wanted")
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--preset")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--csv", type=Path, default=Path("docs/results/learning.csv"))
    parser.add_argument("--name")
    options = parser.parse_args()
    if options.what == "one":
        train_one(Study(**json.loads(options.rest[0])), int(options.rest[1]))
        return
    if options.what == "run":
        env, algo = options.rest
        name = options.name or "-".join([env, algo, *options.sets])
        sets = tuple(options.sets)
        studies = [Study(name, env, algo, options.steps, None, options.preset, sets)]
    else:
        studies = {"floors": FLOORS, "reinforce": REINFORCE, "sac": SAC}[options.what]
        studies = [study for study in studies if not options.rest or study.name in options.rest]
    first, _, last = options.seeds.partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    run_all([(study, seed) for study in studies for seed in seeds], options.jobs, options.csv)
    report(studies, seeds, options.csv)


def run_all(work: list[tuple[Study, int]], jobs: int, path: Path) -> None:
    """Keep `jobs` seeds going until all are in the CSV."""
    finished = {(row["study"], int(row["seed"])) for row in rows(path) if row["final"] == "1"}
    waiting = [(study, seed) for study, seed in work if (study.name, seed) not in finished]
    running: list[tuple[Study, int, subprocess.Popen[str]]] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < jobs:
            study, seed = waiting.pop(0)
            command = [sys.executable, __file__, "one", json.dumps(study.__dict__), str(seed)]
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            running.append((study, seed, process))
        for entry in list(running):
            study, seed, process = entry
            if process.poll() is None:
                continue
            running.remove(entry)
            assert process.stdout is not None
            text = process.stdout.read()
            if process.returncode:
                print(f"{study.name} seed {seed} failed:\n{text}", file=sys.stderr)
                continue
            append(path, json.loads(text.splitlines()[-1]))
            last = json.loads(text.splitlines()[-1])[-1]
            print(f"{study.name} seed {seed}: {last['return_mean']:.1f} "
                  f"in {last['train_seconds']:.0f} s", flush=True)  # fmt: skip
        time.sleep(0.5)


def train_one(study: Study, seed: int) -> None:
    """One seed, in this process; prints its curve as JSON."""
    import tempfile

    from rlflame import api, build, presets

    with tempfile.TemporaryDirectory() as folder:
        config, preset = presets.resolve(
            environment=study.env,
            algorithm=study.algo,
            preset=study.preset,
            sets=[*study.sets],
            flags={
                "stop_at_steps": study.steps,
                "stop_at_iterations": None,
                "learning.seed": seed,
                "runtime.fleet": "inline",
                "runtime.out": f"{folder}/run",
                "runtime.checkpoint_every_steps": 10**9,
            },
            continuous=build.acts_continuously,
        )
        started = time.monotonic()
        result = api.train(config)
        seconds = time.monotonic() - started
        lines = [json.loads(x) for x in (Path(folder) / "run/metrics.jsonl").open()]
        trained = list(csv.DictReader((Path(folder) / "run/episodes.csv").open()))[-100:]
    common = {"study": study.name, "env": study.env, "algo": study.algo, "preset": preset,
              "seed": seed, "train_seconds": round(seconds, 1)}  # fmt: skip
    curve = [
        {**common, "step": line["steps"], "return_mean": line["eval_return_mean"],
         "return_std": line["eval_return_std"], "episodes": int(line["eval_episodes"]),
         "final": 0, "exploring_return": ""}
        for line in lines
        if "eval_return_mean" in line
    ]  # fmt: skip
    last = result.evaluation
    assert last is not None
    curve.append({**common, "step": result.progress.steps, "return_mean": last.mean,
                  "return_std": last.std, "episodes": last.episodes, "final": 1,
                  "exploring_return": sum(float(row["r"]) for row in trained) / len(trained)}
                 )  # fmt: skip
    print(json.dumps(curve))


def rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, lines: list[dict[str, object]]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(lines)


def report(studies: list[Study], seeds: list[int], path: Path) -> None:
    """IQM over seeds of the final evaluations, its interval, the worst seed; and the mean return
    of the last 100 training episodes, with exploration."""
    import numpy as np

    from rlflame.evaluate import interquartile_mean

    generator = np.random.default_rng(0)
    print("| study | seeds | IQM | 95% interval | worst | exploring | floor | met |")
    print("|---|---|---|---|---|---|---|---|")
    for study in studies:
        ended = [
            row for row in rows(path)
            if row["study"] == study.name and row["final"] == "1" and int(row["seed"]) in seeds
        ]  # fmt: skip
        if not ended:
            continue
        values = np.array([float(row["return_mean"]) for row in ended])
        exploring = [float(row["exploring_return"]) for row in ended if row["exploring_return"]]
        picks = generator.integers(0, len(values), (2000, len(values)))
        low, high = np.quantile(
            [interquartile_mean(values[pick]) for pick in picks], [0.025, 0.975]
        )
        iqm = interquartile_mean(values)
        met = "" if study.floor is None else ("yes" if iqm >= study.floor else "no")
        noisy = f"{np.mean(exploring):.1f}" if exploring else ""
        print(f"| {study.name} | {len(values)} | {iqm:.1f} | [{low:.1f}, {high:.1f}] "
              f"| {values.min():.1f} | {noisy} | {study.floor or ''} | {met} |")  # fmt: skip


if __name__ == "__main__":
    main()
