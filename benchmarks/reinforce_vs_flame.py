"""REINFORCE on Hopper beside Flame's own example with --local, in turn, on this machine.

    python benchmarks/reinforce_vs_flame.py --example DIR --repeat 5 \
        --csv docs/results/reinforce_vs_flame.csv

DIR is the folder of Flame's example (`main.py`, `model.py`), which is run as it is; its
environments are wrapped, so that their steps can be counted. Of both sides the iterations after the
first count: 50 episodes each, learning included. Ours runs with the default recipe and with what
the example learns with (`reinforce-classic`); policies that have learned more have longer episodes,
so episodes and steps a second are both told.
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

from idle import others

EPISODES = 50
PRESETS = ("default-reinforce", "reinforce-classic")
COLUMNS = ("round", "at_work", "side", "episodes_per_s", "steps_per_s")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", type=Path, required=True)
    parser.add_argument(
        "--iterations", type=int, default=101, help="one more than a multiple of 10"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="write every round's rates there")
    options = parser.parse_args()
    ratios: dict[str, list[tuple[float, float]]] = {}
    rows: list[tuple[object, ...]] = []
    for turn in range(options.repeat):
        at_work = others()
        theirs = example(options.example, options.iterations)
        rows.append((turn, at_work, "example --local", *theirs))
        print(f"{turn}: the example with --local: {told(theirs)}", flush=True)
        for preset in PRESETS:
            ours = own(preset, options.iterations)
            rows.append((turn, at_work, preset, *ours))
            pair = ours[0] / theirs[0], ours[1] / theirs[1]
            ratios.setdefault(preset, []).append(pair)
            print(f"{turn}: rlflame with {preset}: {told(ours)}; {pair[0]:.1f} times the episodes, "
                  f"{pair[1]:.1f} times the steps", flush=True)  # fmt: skip
        if options.csv:
            with options.csv.open("w", newline="") as file:
                csv.writer(file).writerows([COLUMNS, *rows])
    for preset, pairs in ratios.items():
        episodes, steps = (statistics.median(kind) for kind in zip(*pairs, strict=True))
        print(f"{preset}: {episodes:.1f} times the episodes and {steps:.1f} times the steps a "
              f"second (medians of {len(pairs)})")  # fmt: skip


def told(rates: tuple[float, float]) -> str:
    episodes, steps = rates
    return f"{episodes:.1f} episodes/s, {steps:.0f} steps/s, {steps / episodes:.0f} an episode"


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
    main()
