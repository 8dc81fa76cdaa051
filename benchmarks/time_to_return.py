"""When rlflame has what stable-baselines3 has in the end: tables of what was recorded before.

    python benchmarks/time_to_return.py

Trains nothing. What theirs has in the end is the mean over its seeds of the evaluations in the last
twentieth of its training; ours has as much from the evaluation on after which the mean over its
seeds is never below that again. Of PPO, steps become seconds by the medians of the pairs, each from
Enter to the end of the final evaluation. Of SAC, by the updates a second on two threads, one for
each step after the first 10,000; of theirs the faster of its two ways.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from rlflame.estimates import tail_mean

RESULTS = Path(__file__).parent.parent / "docs" / "results"
HEAD = ("environment", "theirs in the end (seeds)", "after", "ours has that after", "or", "earlier",
        "ours in the end (seeds)", "after")  # fmt: skip
#: Of SAC the random steps before it learns, which take no time that counts.
RANDOM_STEPS = 10_000
#: Of each seed, steps to returns.
Curves = dict[str, dict[int, float]]


class Pace(NamedTuple):
    """Steps a second, from a step on."""

    ours: float
    theirs: float
    begins_at: int = 0


def main() -> None:
    for algorithm, envs, steps, rates in (
        ("ppo", ("Hopper", "HalfCheetah", "Walker2d", "Ant"), 1_000_000, by_pairs),
        ("sac", ("HalfCheetah", "Hopper"), 300_000, by_updates),
    ):
        print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
        for env in envs:
            print("| " + " | ".join(row(algorithm, env, steps, rates(env))) + " |")
        print()


def row(algorithm: str, env: str, total: int, pace: Pace) -> tuple[str, ...]:
    """Of one environment."""
    study = f"{algorithm}-{env.lower()}-{total // 1000}k".replace("-1000k", "-1m")
    ours = curves(row for row in records(f"{algorithm}.csv")
                  if row["study"] == study and row["final"] == "0")  # fmt: skip
    theirs = curves(row for row in records(f"{algorithm}_control.csv")
                    if row["algo"] == f"{algorithm}-sb3" and row["env"] == f"{env}-v5")  # fmt: skip
    wanted = fmean(
        fmean(value for step, value in curve.items() if step > 0.95 * total)
        for curve in theirs.values()
    )
    reached = fmean(tail_mean(np.array([*curve.values()])) for curve in ours.values())
    steps = reached_at(ours, wanted)
    our_s, all_s, their_s = (
        (count - pace.begins_at) / rate
        for count, rate in ((steps, pace.ours), (total, pace.ours), (total, pace.theirs))
    )
    return (f"{env}-v5", f"{wanted:,.0f} ({len(theirs)})", f"{their_s / 60:.1f} min",
            f"{steps:,} steps", f"{our_s:.0f} s", f"{their_s / our_s:.1f} times",
            f"{reached:,.0f} ({len(ours)})", f"{all_s / 60:.1f} min")  # fmt: skip


def by_pairs(env: str) -> Pace:
    pairs = [row for row in records("ppo_vs_sb3.csv") if row["sb3_s"]]
    pairs = [row for row in pairs if (row["env"], row["steps"]) == (f"{env}-v5", "1000000")]
    return Pace(*(1_000_000 / median(float(row[side]) for row in pairs)
                  for side in ("rlflame_s", "sb3_s")))  # fmt: skip


def by_updates(env: str) -> Pace:
    sides: dict[str, list[float]] = {}
    for row in records(f"sac_vs_sb3_{env.lower()}.csv"):
        if row["threads"] == "2":
            sides.setdefault(row["side"], []).append(float(row["updates_per_s"]))
    theirs = max(median(sides[side]) for side in ("sb3 1 env", "sb3 8 envs"))
    return Pace(median(sides["rlflame"]), theirs, RANDOM_STEPS)


def records(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def curves(rows: Iterable[dict[str, str]]) -> Curves:
    found: Curves = {}
    for row in rows:
        found.setdefault(row["seed"], {})[int(row["step"])] = float(row["return_mean"])
    return found


def reached_at(seeds: Curves, wanted: float) -> int:
    """The first evaluation from which on the mean over seeds is never below what is wanted."""
    steps = sorted(set.intersection(*(set(curve) for curve in seeds.values())))
    below = [step for step in steps if fmean(curve[step] for curve in seeds.values()) < wanted]
    return next(step for step in steps if not below or step > below[-1])


if __name__ == "__main__":
    main()
