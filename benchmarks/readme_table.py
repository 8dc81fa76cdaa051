"""Writes the table of minutes and returns in README.md from the records in docs/results.

python benchmarks/readme_table.py            # print the table
python benchmarks/readme_table.py --write    # write it between the markers

Minutes are medians of the timed runs in `ppo_vs_sb3.csv`. A return is the mean over seeds of each
seed's last evaluations: the last twentieth for rlflame, all after 95% of the steps for
stable-baselines3, which `ppo_vs_sb3.py` evaluates less often.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import numpy as np
from script import write_block

from rlflame.statistics import compute_mean_std, compute_tail_mean

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "README.md"
NAME = "readme-table"
ENVS = ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5")
STEPS = 1_000_000
HEAD = (
    "PPO, 1,000,000 steps",
    "rlflame, minutes",
    "return",
    "stable-baselines3, minutes",
    "return",
)


def make_table() -> str:
    """One row for each environment."""
    runs = read_records("ppo_vs_sb3.csv")
    rows = [HEAD, ("---", *["--:"] * (len(HEAD) - 1))]
    for env in ENVS:
        timed = [
            run
            for run in runs
            if (run["env"], run["steps"], run["set"]) == (env, str(STEPS), "") and run["sb3_s"]
        ]
        study = f"ppo-{env.partition('-')[0].lower()}-1m"
        evaluations = [
            row for row in read_records("ppo.csv") if (row["study"], row["final"]) == (study, "0")
        ]
        control = [
            row
            for row in read_records("ppo_control.csv")
            if (row["algo"], row["env"]) == ("ppo-sb3", env) and int(row["step"]) > 0.95 * STEPS
        ]
        rows.append((
            env,
            format_minutes(run["rlflame_s"] for run in timed),
            format_return([compute_tail_mean(y) for y in group_returns(evaluations)]),
            format_minutes(run["sb3_s"] for run in timed),
            format_return([y.mean() for y in group_returns(control)]),
        ))  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def read_records(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def group_returns(rows: list[dict[str, str]]) -> list[np.ndarray]:
    """The returns of each seed, in the order of the steps."""
    seeds: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        point = (int(row["step"]), float(row["return_mean"]))
        seeds.setdefault(row["seed"], []).append(point)
    return [np.array([y for _, y in sorted(points)]) for points in seeds.values()]


def format_minutes(seconds: Iterable[str]) -> str:
    return f"{median(map(float, seconds)) / 60:.1f}"


def format_return(values: list[float]) -> str:
    """Mean and standard deviation over seeds, and their number."""
    result = compute_mean_std(np.array(values))
    return f"{result.mean:,.0f} ± {result.std:,.0f} ({len(values)} seeds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    if parser.parse_args().write:
        write_block(PAGE, NAME, make_table())
    else:
        print(make_table())


if __name__ == "__main__":
    main()
