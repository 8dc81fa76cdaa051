"""Time REINFORCE on Hopper, and compare it with Flame's own example with --local.

    python benchmarks/reinforce_vs_flame.py --example DIR --repeat 5 \
        --csv docs/results/reinforce_vs_flame.csv

DIR is the folder of Flame's example (`main.py`, `model.py`). The script runs the example unchanged,
and wraps its environments to count their steps. All sides run in turn on this machine. rlflame runs
with its default preset and with `reinforce-classic`, which has the hyperparameters of the example.
Each iteration has 50 episodes and includes learning. The first iteration is not timed. A policy
that has learned more has longer episodes, so the script prints episodes and steps per second.

With --csv, the script writes each round when it ends and does not repeat rounds that the file
contains.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from idle import others, processor
from script import ended, positive, table

EPISODES = 50
PRESETS = ("default-reinforce", "reinforce-classic")
EXAMPLE = "example --local"
#: Runs the example and prints the time and the number of steps at its first and last line.
_WATCHED = """
import json, runpy, sys, time
import gymnasium

count, make, heard = [0], gymnasium.make, []


class Counted(gymnasium.Wrapper):
    def step(self, action):
        count[0] += 1
        return self.env.step(action)


class Listening:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        if text.startswith("Iteration"):
            heard.append((time.monotonic(), count[0]))
        return len(text)

    def flush(self):
        self.stream.flush()


gymnasium.make = lambda *given, **named: Counted(make(*given, **named))
sys.path.insert(0, ".")
sys.argv = ["main.py", *sys.argv[1:]]
out, sys.stdout = sys.stdout, Listening(sys.stdout)
runpy.run_path("main.py", run_name="__main__")
sys.stdout = out
print(json.dumps([heard[0], heard[-1]]))
"""


class Row(NamedTuple):
    """The rates of one side in one round."""

    round: int
    processor: str
    at_work: str
    side: str
    episodes: int
    episodes_per_s: float
    steps_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", type=Path, required=True)
    parser.add_argument(
        "--iterations", type=positive, default=101, help="one more than a multiple of 10"
    )
    parser.add_argument(
        "--repeat", type=positive, default=5, help="number of rounds, including those in --csv"
    )
    parser.add_argument("--csv", type=table, help="CSV file; each round is appended when it ends")
    options = parser.parse_args()
    if options.iterations < 2:
        parser.error("--iterations must be 2 or more, because the first is not timed")
    if not (options.example / "main.py").is_file():
        parser.error(f"{options.example} has no main.py: pass the folder of Flame's example")
    episodes = (options.iterations - 1) * EPISODES
    rows = known(options.csv, episodes)
    for turn in range(rows[-1].round + 1 if rows else 0, options.repeat):
        before = processor(), others()
        theirs = example(options.example, options.iterations)
        ours = {each: own(each, options.iterations) for each in PRESETS}
        sides = {EXAMPLE: theirs, **ours}
        found = [Row(turn, *before, side, episodes, *rates) for side, rates in sides.items()]
        for row in found:
            print(told(row), flush=True)
        rows += found
        if options.csv:
            keep(options.csv, found)
    for preset in PRESETS:
        ours, theirs = ([row for row in rows if row.side == side] for side in (preset, EXAMPLE))
        pairs = [*zip(ours, theirs, strict=True)]
        by_episodes = statistics.median(a.episodes_per_s / b.episodes_per_s for a, b in pairs)
        by_steps = statistics.median(a.steps_per_s / b.steps_per_s for a, b in pairs)
        print(f"{preset}: {by_episodes:.1f} times the episodes and {by_steps:.1f} times the steps "
              f"a second (medians of {len(pairs)})")  # fmt: skip


def known(path: Path | None, episodes: int) -> list[Row]:
    """Read the rounds with this number of episodes that are in the file."""
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        found = [
            Row(int(row["round"]), row["processor"], row["at_work"], row["side"],
                int(row["episodes"]), float(row["episodes_per_s"]), float(row["steps_per_s"]))
            for row in csv.DictReader(file)
        ]  # fmt: skip
    return [row for row in found if row.episodes == episodes]


def keep(path: Path, rows: list[Row]) -> None:
    begun = path.exists() and path.stat().st_size > 0
    with path.open("a", newline="") as file:
        csv.writer(file).writerows(rows if begun else [Row._fields, *rows])


def told(row: Row) -> str:
    return (
        f"{row.round}: {row.side}: {row.episodes_per_s:.1f} episodes/s, {row.steps_per_s:.0f} "
        f"steps/s, {row.steps_per_s / row.episodes_per_s:.0f} an episode"
    )


def example(source: Path, iterations: int) -> tuple[float, float]:
    """Return the example's episodes and steps per second, from first to last line."""
    command = [sys.executable, "-c", _WATCHED, "--local", "--env", "hopper", "--iterations",
               str(iterations), "--episodes-per-iter", str(EPISODES)]  # fmt: skip
    ended = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (began, before), (over, after) = json.loads(ended.stdout.splitlines()[-1])
    return (iterations - 1) * EPISODES / (over - began), (after - before) / (over - began)


def own(preset: str, iterations: int) -> tuple[float, float]:
    """Return rlflame's episodes and steps per second, from timing.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rlflame", "train", "--env", "hopper", "--algo",
                   "reinforce", "--preset", preset, "--local", "--iterations", str(iterations),
                   "--episodes-per-iter", str(EPISODES), "--set", "evaluation.every_steps=none",
                   "--set", "evaluation.final_episodes=1", "--out", f"{folder}/run",
                   "--plain"]  # fmt: skip
        environment = {**os.environ, "FLAME_ENDPOINT": ""}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        lines = [json.loads(line) for line in (Path(folder) / "run/timing.jsonl").open()]
        spent = [line["wall_s"] for line in lines if "closing" not in line][1:]
        with (Path(folder) / "run/episodes.csv").open(newline="") as file:
            lengths = [int(row["l"]) for row in csv.DictReader(file)][EPISODES:]
    return len(lengths) / sum(spent), sum(lengths) / sum(spent)


if __name__ == "__main__":
    ended(main)
