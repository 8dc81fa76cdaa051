"""Train presets with several seeds and write their evaluations into a CSV file.

    python benchmarks/learning.py reinforce --csv docs/results/reinforce.csv  # default, classic
    python benchmarks/learning.py sac --seeds 0-4 --csv docs/results/sac.csv
    python benchmarks/learning.py ppo --seeds 0-9 --csv docs/results/ppo.csv
    python benchmarks/learning.py long --seeds 0-9 --csv docs/results/reinforce_long.csv
    python benchmarks/learning.py wide --seeds 0-4 --csv docs/results/wide.csv
    python benchmarks/learning.py untuned --seeds 0-4 --csv docs/results/untuned.csv
    python benchmarks/learning.py spaces --seeds 0-2 --csv docs/results/spaces.csv
    python benchmarks/learning.py run hopper ppo --steps 300000 --seeds 100-102 \
        --set ppo.minibatch_size=256

Studies with the published plan run 20 evaluation episodes every 10,000 steps (every 1,000 steps if
the study is short). In the report, P4 is the mean of the last twentieth of the evaluations, and P2
is the best mean over seeds at one step. The seeds of a study run as one job, --jobs at a time. The
script writes each seed when it ends, and does not train a seed again that is in the CSV file.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from script import ended, positive, table

from rlflame.console.base import NullView, RunStart

COLUMNS = ["study", "env", "algo", "preset", "seed", "step", "return_mean", "return_std",
           "episodes", "train_seconds", "final", "exploring_return"]  # fmt: skip


@dataclass(frozen=True)
class Study:
    """One row of a table: a preset, an environment and a number of steps."""

    name: str
    env: str
    algo: str
    steps: int
    floor: float | None = None
    preset: str | None = None
    sets: tuple[str, ...] = ()
    #: Evaluate as in published results: 20 episodes every 10,000 steps.
    published_plan: bool = False

    def overrides(self) -> list[str]:
        if not self.published_plan:
            return [*self.sets]
        every = 10_000 if self.steps >= 100_000 else 1_000
        plan = {"every_steps": every, "episodes": 20, "final_episodes": 20}
        return [*(f"evaluation.{name}={value}" for name, value in plan.items()), *self.sets]


REINFORCE = [
    Study(f"{kind}-{env}", env, "reinforce", steps, preset=preset)
    for env, steps in (("cartpole", 200_000), ("hopper", 300_000), ("ant", 300_000))
    for kind, preset in (("default", None), ("classic", "reinforce-classic"))
]
SAC = [
    Study(f"sac-{env}-{steps // 1000}k", env, "sac", steps, floor,
          sets=("learning.threads=1",), published_plan=True)
    for env, steps, floor in (("pendulum", 20_000, -157), ("halfcheetah", 300_000, 8000),
                              ("hopper", 300_000, 2800), ("walker2d", 300_000, 3500),
                              ("ant", 300_000, 2500))
]  # fmt: skip
#: The two environments with the preset of the MuJoCo family, for comparison with their own presets.
SAC += [
    Study(f"family-{env}-300k", env, "sac", 300_000, None, "mujoco-sac",
          ("learning.threads=1",), published_plan=True)
    for env in ("hopper", "walker2d")
]  # fmt: skip
PPO = [
    Study(f"ppo-{env}-{length}", env, "ppo", steps, floor, published_plan=True)
    for length, steps, floors in (
        ("1m", 1_000_000, {"hopper": 3000, "halfcheetah": 5000, "walker2d": 4200, "ant": 2500,
                           "swimmer": 282, "lunarlander": 242}),
        ("500k", 500_000, {"lunarlander": 200}),
        ("100k", 100_000, {"cartpole": 500, "pendulum": -175, "mountaincarcontinuous": 90}),
    )
    for env, floor in floors.items()
]  # fmt: skip
#: REINFORCE for the numbers of steps of published results.
LONG = [
    Study(f"reinforce-{env}-{steps // 1_000_000}m" if steps >= 1_000_000
          else f"reinforce-{env}-{steps // 1000}k",
          env, "reinforce", steps, floor, published_plan=True)
    for env, steps, floor in (("hopper", 3_000_000, 800), ("halfcheetah", 3_000_000, 880),
                              ("walker2d", 3_000_000, 460), ("ant", 3_000_000, 300),
                              ("cartpole", 200_000, 483))
]  # fmt: skip
#: The presets for clusters, which use more steps and learn less from each step.
WIDE = [
    Study(f"wide-{env}-3m", env, "ppo", 3_000_000, floor, preset=f"{family}-ppo-wide",
          published_plan=True)
    for env, family, floor in (("hopper", "hopper", 3100), ("halfcheetah", "mujoco", 6000),
                               ("walker2d", "mujoco", 4000))
]  # fmt: skip
#: The default preset on six environments for which no preset was tuned, and the preset of the
#: MuJoCo family on the four of them that had no other preset when this was measured.
UNTUNED = [
    Study(f"{kind}-{env}", name, "ppo", steps, preset=preset, published_plan=True,
          # With 10,000 steps, evaluations would take three quarters of the time: episodes are long.
          sets=("evaluation.every_steps=50000",) if kind + env == "defaultbipedalwalker" else ())
    for kind, preset in (("default", "default-ppo"), ("family", "mujoco-ppo"))
    for env, name, steps in (("acrobot", "acrobot", 500_000),
                             ("mountaincarcontinuous", "MountainCarContinuous-v0", 500_000),
                             ("swimmer", "swimmer", 1_000_000),
                             ("reacher", "reacher", 1_000_000),
                             ("pusher", "pusher", 1_000_000),
                             ("bipedalwalker", "bipedalwalker", 1_000_000))
    if kind == "default" or steps == 1_000_000
]  # fmt: skip
#: Environments with choices as observations or actions, evaluated on many episodes.
SPACES = [
    Study(f"spaces-{name}", env, "ppo", steps, floor,
          sets=(f"evaluation.final_episodes={episodes}",))
    for name, env, steps, floor, episodes in (
        ("frozenlake", "FrozenLake-v1", 500_000, 0.70, 5_000),
        ("taxi", "Taxi-v4", 500_000, 7.5, 1_000),
        ("cliffwalking", "CliffWalking-v1", 200_000, -13.0, 1_000),
        ("doorkey", "minigrid:MiniGrid-DoorKey-5x5-v0", 500_000, 0.9, 1_000),
        ("blackjack", "Blackjack-v1", 500_000, -0.06, 50_000),
    )
]  # fmt: skip
STUDIES = {"reinforce": REINFORCE, "sac": SAC, "ppo": PPO, "long": LONG,
           "wide": WIDE, "untuned": UNTUNED, "spaces": SPACES}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*STUDIES, "run"])
    parser.add_argument("rest", nargs="*", help="for run: ENV ALGO; otherwise names of studies")
    parser.add_argument("--steps", type=positive, default=300_000)
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--preset")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--csv", type=table, default=Path("learning.csv"))
    parser.add_argument("--name")
    parser.add_argument("--report", action="store_true", help="only report the CSV file")
    parser.add_argument("--published-plan", action="store_true", help="20 episodes every 10k steps")
    options = parser.parse_args()
    if options.report and not options.csv.exists():
        parser.error(f"{options.csv} does not exist")
    if options.what == "run":
        if len(options.rest) != 2:
            parser.error(f"run takes ENV ALGO, not {options.rest}")
        env, algo = options.rest
        name = options.name or "-".join([env, algo, *options.sets])
        sets, plan = tuple(options.sets), options.published_plan
        studies = [Study(name, env, algo, options.steps, None, options.preset, sets, plan)]
    else:
        studies = STUDIES[options.what]
        unknown = {*options.rest} - {study.name for study in studies}
        if unknown:
            parser.error(f"{options.what} has no study {', '.join(sorted(unknown))}; it has "
                         f"{', '.join(study.name for study in studies)}")  # fmt: skip
        studies = [study for study in studies if not options.rest or study.name in options.rest]
    from rlflame.storage.sweep_folder import parse_seeds

    seeds = list(parse_seeds(options.seeds))
    for study in studies if not options.report else []:
        run(study, seeds, options.jobs, options.csv)
    report(studies, seeds, options.csv)


def run(study: Study, seeds: list[int], jobs: int, path: Path) -> None:
    """Train the seeds that are not in the CSV file yet."""
    from rlflame import api
    from rlflame.config import resolve
    from rlflame.config.flags import TrainFlags
    from rlflame.experiment import components

    finished = {int(row["seed"]) for row in rows(path)
                if row["study"] == study.name and row["final"] == "1"}  # fmt: skip
    wanted = [seed for seed in seeds if seed not in finished]
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        flags = TrainFlags(
            env=study.env,
            algo=study.algo,
            preset=study.preset,
            sets=[*study.overrides(), f"runtime.checkpoint_every_steps={10**9}"],
            steps=study.steps,
            fleet="inline",
            workers=jobs,
            out=Path(folder, "job"),
        )
        config, preset = resolve.resolve(flags, components.has_continuous_actions)
        path.parent.mkdir(parents=True, exist_ok=True)
        api.train_seeds(config, wanted, preset=preset, show=Keeper(study, preset, path))


class Keeper(NullView):
    """Writes the curve of each seed into the CSV file when the seed ends."""

    def __init__(self, study: Study, preset: str, path: Path) -> None:
        self._study = study
        self._preset = preset
        self._path = path
        self._folder = Path()

    def show_note(self, text: str) -> None:
        print(text, file=sys.stderr)

    def open(self, start: RunStart) -> AbstractContextManager[None]:
        self._folder = start.folder
        return super().open(start)

    def show_seed_end(self, seed: int, outcome: Any) -> None:
        name = f"{self._study.name} seed {seed}"
        if outcome.end != "finished":
            said = f"{outcome.error.message}\n{outcome.error.detail}" if outcome.error else ""
            print(f"{name} {outcome.end}: {said}", file=sys.stderr)
            return
        lines = curve(self._study, self._preset, seed, self._folder / f"seed-{seed}")
        append(self._path, lines)
        last = lines[-1]
        print(f"{name}: {last['return_mean']:.4g} in {last['train_seconds']:.0f} s", flush=True)


def curve(study: Study, preset: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Convert a finished run to rows of the CSV file, the final evaluation last."""
    from rlflame.storage import run_reader

    found = run_reader.read_run(folder)
    last, clock = found.evaluation, found.compute_elapsed_s("wall_s")
    assert last is not None
    assert clock is not None
    returns, _ = found.read_episodes()
    common = {"study": study.name, "env": study.env, "algo": study.algo, "preset": preset,
              "seed": seed, "train_seconds": round(float(clock[1][-1]), 1)}  # fmt: skip
    lines = [
        {**common, "step": line["steps"], "return_mean": line["eval_return_mean"],
         "return_std": line["eval_return_std"], "episodes": int(line["eval_episodes"]),
         "final": 0, "exploring_return": ""}
        for line in found.metrics
        if "eval_return_mean" in line
    ]  # fmt: skip
    final = {"step": found.steps, "return_mean": last["mean"], "return_std": last["std"],
             "episodes": last["episodes"], "final": 1,
             "exploring_return": float(returns[-100:].mean())}  # fmt: skip
    return [*lines, {**common, **final}]


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
        writer.writerows({name: short(value) for name, value in line.items()} for line in lines)


def short(value: object) -> object:
    """Round a float to six digits, which keeps the file small."""
    return f"{value:.6g}" if isinstance(value, float) else value


def report(studies: list[Study], seeds: list[int], path: Path) -> None:
    """Print statistics over the seeds of each study.

    They are the IQM of the final evaluations with its interval, the worst seed, P4 and P2 with
    their standard deviations, and the mean return of the last 100 training episodes, with
    exploration.
    """
    import numpy as np

    from rlflame.statistics import (
        FEWEST_SEEDS,
        compute_iqm_interval,
        compute_mean_std,
        compute_tail_mean,
        find_best_mean,
    )

    print("| study | seeds | IQM | 95% interval | worst | P4 | P2 | exploring | floor |")
    print("|---|---|---|---|---|---|---|---|---|")
    for study in studies:
        lines = [row for row in rows(path) if row["study"] == study.name]
        ended = [row for row in lines if row["final"] == "1" and int(row["seed"]) in seeds]
        if not ended:
            continue
        # The bootstrap interval depends on the order, which must not depend on which seed ended
        # first.
        ended.sort(key=lambda row: int(row["seed"]))
        values = np.array([float(row["return_mean"]) for row in ended])
        curves = [evaluations([row for row in lines if row["seed"] == one["seed"]])
                  for one in ended]  # fmt: skip
        # Classic REINFORCE studies have only a final evaluation.
        tails = [compute_tail_mean(returns) for _, returns in curves if len(returns)]
        p4 = spread(compute_mean_std(np.array(tails)), 1) if tails else ""
        best = find_best_mean(curves)
        p2 = spread(best[1], 0) if best else ""
        exploring = [float(row["exploring_return"]) for row in ended if row["exploring_return"]]
        found = compute_iqm_interval([values])
        noisy = f"{np.mean(exploring):.1f}" if exploring else ""
        interval = f"[{found.low:.1f}, {found.high:.1f}]" if len(values) >= FEWEST_SEEDS else "-"
        print(f"| {study.name} | {len(values)} | {found.value:.1f} "
              f"| {interval} | {values.min():.1f} | {p4} | {p2} | {noisy} "
              f"| {study.floor or ''} |")  # fmt: skip


def spread(found: Any, places: int) -> str:
    """Format a mean and its standard deviation over seeds."""
    return f"{found.mean:.{places}f} ± {found.std:.{places}f}"


def evaluations(lines: list[dict[str, str]]) -> tuple[Any, Any]:
    """The steps and returns of the evaluations of one seed during training."""
    import numpy as np

    found = [row for row in lines if row["final"] == "0"]
    return (
        np.array([float(row["step"]) for row in found]),
        np.array([float(row["return_mean"]) for row in found]),
    )


if __name__ == "__main__":
    ended(main)
