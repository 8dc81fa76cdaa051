"""How soon PPO's presets have the best that stable-baselines3's defaults come to: from the records.

    python benchmarks/time_to_return.py
    python benchmarks/time_to_return.py --late

Trains nothing, and prints the tables of docs/results.md. Theirs is taken where the mean over its
seeds was best in the whole training, as P2 has it. Ours has that from the evaluation on after which
the mean over its seeds is never below it again. What a number of steps takes is on the line through
the medians of the timed pairs of 100,000 steps and of a million. With `--late`, what the last
evaluations of both are.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from script import ended

from rlflame.statistics import compute_iqm_interval, compute_tail_mean, find_best_mean

RESULTS = Path(__file__).parent.parent / "docs" / "results"
ENVS = ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5")
STEPS = (100_000, 1_000_000)
HEAD = ("environment", "best mean of theirs (seeds)", "theirs there at step", "after",
        "ours there for good from step", "after", "times as soon", "a million steps, ours",
        "theirs")  # fmt: skip
LATE_HEAD = ("environment", "rlflame, seeds 0 to 9", "stable-baselines3, seeds 0 to 4")
#: Steps and returns of a seed.
Curve = tuple[Any, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--late", action="store_true", help="what the last evaluations are")
    head, made = (LATE_HEAD, late) if parser.parse_args().late else (HEAD, row)
    for cells in (head, ("---",) * len(head), *map(made, ENVS)):
        print("| " + " | ".join(cells) + " |")


def row(env: str) -> tuple[str, ...]:
    """The cells of one environment."""
    theirs, ours = both(env)
    best = find_best_mean(theirs)
    if best is None or not ours:
        raise SystemExit(f"{env} has no evaluations on record: {RESULTS}")
    there, wanted = best[0], best[1].mean
    times = {side: paired(env, side) for side in ("rlflame_s", "sb3_s")}
    their_s, all_theirs = (on_line(times["sb3_s"], steps) for steps in (there, STEPS[1]))
    said = [env, f"{wanted:,.0f} ({len(theirs)})", f"{there:,}", f"{their_s / 60:.1f} min"]
    steps = reached_at(ours, wanted)
    if steps is None:
        said += ["not yet", "", ""]
    else:
        our_s = on_line(times["rlflame_s"], steps)
        said += [f"{steps:,}", f"{our_s:.0f} s", f"{their_s / our_s:.0f}"]
    all_ours = on_line(times["rlflame_s"], STEPS[1])
    return (*said, f"{all_ours / 60:.1f} min", f"{all_theirs / 60:.1f} min")


def late(env: str) -> tuple[str, ...]:
    """The last twentieth of ours, and of theirs all after 950,000 steps."""
    theirs, ours = both(env)
    ends = [compute_tail_mean(y) for _, y in ours], [y[x > 950_000].mean() for x, y in theirs]
    found = [compute_iqm_interval([np.array(side)]) for side in ends]
    return (env, *(f"{each.value:.0f} [{each.low:.0f}, {each.high:.0f}]" for each in found))


def both(env: str) -> tuple[list[Curve], list[Curve]]:
    """The curves of their seeds and of ours."""
    study = f"ppo-{env.partition('-')[0].lower()}-1m"
    theirs = curves(
        line
        for line in records("ppo_control.csv")
        if (line["algo"], line["env"]) == ("ppo-sb3", env)
    )
    ours = curves(
        line for line in records("ppo.csv") if (line["study"], line["final"]) == (study, "0")
    )
    return theirs, ours


def records(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def curves(lines: Iterable[dict[str, str]]) -> list[Curve]:
    """Of each seed."""
    seeds: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        point = (int(line["step"]), float(line["return_mean"]))
        seeds.setdefault(line["seed"], []).append(point)
    return [
        (np.array([x for x, _ in points]), np.array([y for _, y in points]))
        # In order: an interval, which is drawn by place, must not tell which seed was over first.
        for _, points in sorted(seeds.items(), key=lambda item: int(item[0]))
    ]


def reached_at(seeds: list[Curve], wanted: float) -> int | None:
    """From which evaluation on the mean over seeds is never below what is wanted."""
    steps, _ = seeds[0]
    if any(not np.array_equal(x, steps) for x, _ in seeds):
        raise SystemExit("Seeds of one study were evaluated at different steps.")
    below = np.flatnonzero(np.mean([y for _, y in seeds], axis=0) < wanted)
    first = int(below[-1]) + 1 if len(below) else 0
    return int(steps[first]) if first < len(steps) else None


def paired(env: str, side: str) -> list[float]:
    """The median seconds of this side for each of `STEPS`."""
    pairs = [line for line in records("ppo_vs_sb3.csv") if line["env"] == env and line["sb3_s"]]
    return [
        median(float(p[side]) for p in pairs if (p["steps"], p["set"]) == (str(steps), ""))
        for steps in STEPS
    ]


def on_line(seconds: list[float], steps: int) -> float:
    """The seconds of so many steps, given those of `STEPS`."""
    (x0, x1), (y0, y1) = STEPS, seconds
    return y0 + (y1 - y0) * (steps - x0) / (x1 - x0)


if __name__ == "__main__":
    ended(main)
