"""REINFORCE on Hopper beside Flame's own example with --local, in turn, on this machine.

    python benchmarks/reinforce_vs_flame.py --example DIR --repeat 5 \
        --csv docs/results/reinforce_vs_flame.csv

DIR is the folder of Flame's example (`main.py`, `model.py`), which is run as it is; its
environments are wrapped, so that their steps can be counted. With --csv a round is written as soon
as it is there, and rounds that the file has are not run again. Of both sides the iterations after
the first count: 50 episodes each, learning included. Ours runs with the default recipe and with
what the example learns with (`reinforce-classic`); policies that have learned more have longer
episodes, so episodes and steps a second are both told.
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
#: Runs the example in a process of its own and tells when it spoke, and after how many steps.
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
    """What one side did in one round."""

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
        "--repeat", type=positive, default=5, help="rounds, those in --csv among them"
    )
    parser.add_argument(
        "--csv", type=table, help="every round's rates, kept as soon as it is there"
    )
    options = parser.parse_args()
    if options.iterations < 2:
        parser.error("--iterations is 2 or more: the first does not count")
    if not (options.example / "main.py").is_file():
        parser.error(f"{options.example} has no main.py: --example is the folder of Flame's")
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
    """The rounds of as many episodes that were written before."""
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
    """Episodes and steps a second between the first word of the example and the last."""
    command = [sys.executable, "-c", _WATCHED, "--local", "--env", "hopper", "--iterations",
               str(iterations), "--episodes-per-iter", str(EPISODES)]  # fmt: skip
    ended = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (began, before), (over, after) = json.loads(ended.stdout.splitlines()[-1])
    return (iterations - 1) * EPISODES / (over - began), (after - before) / (over - began)


def own(preset: str, iterations: int) -> tuple[float, float]:
    """The same of rlflame, by the run's own clock."""
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
