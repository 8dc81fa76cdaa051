"""Trains the policies in checkpoints/ and writes the page about them.

    python benchmarks/policies.py train [NAME...]     # the missing ones, or these
    python benchmarks/policies.py table               # checkpoints/README.md

A policy is the last one of one run of a preset, scored on 100 episodes and exported without its
optimizer. The rank is that of its seed among the seeds in docs/results/ppo.csv.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from script import ended

FOLDER = Path(__file__).resolve().parent.parent / "checkpoints"
RECORD = FOLDER.parent / "docs" / "results" / "ppo.csv"
EPISODES = 100
#: Name, and the options of `rlflame train`.
POLICIES: dict[str, list[str]] = {
    "cartpole": ["--env", "cartpole", "--seed", "0"],
    "pendulum": ["--env", "pendulum", "--algo", "sac", "--seed", "0"],
    "lunarlander": ["--env", "lunarlander", "--seed", "0"],
    "hopper": ["--env", "hopper", "--seed", "0"],
    "halfcheetah": ["--env", "halfcheetah", "--seed", "5"],
    "walker2d": ["--env", "walker2d", "--seed", "9"],
    "ant": ["--env", "ant", "--seed", "7"],
}

#: The policies whose seed has a record of ten in `RECORD`.
RANKED = ("ant", "halfcheetah", "hopper", "walker2d")

_HEAD = """# Trained policies

Seven policies, trained with rlflame's presets. A file holds the weights, the recipe and the
recorded evaluation. Loading it runs no code.

```
rlflame eval checkpoints/hopper.safetensors --expect-recorded
rlflame render checkpoints/hopper.safetensors -o hopper.gif --vs-untrained
```

The first command runs the recorded episodes again. On a machine with the same fingerprint, the
returns are equal to the last bit. On another machine, the command reports whether the intervals
overlap.

Each policy is one seed. The rank is its place among the seeds 0 to 9 by final evaluation; a policy
without a rank is seed 0. [Results](../docs/results.md) has the returns over many seeds.

The return is the mean over {episodes} episodes without exploration, with a 95% bootstrap interval.
`python benchmarks/policies.py table` writes this page from the files.

| file | environment | return | 95% interval | rank | steps | kB | command |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["train", "table"])
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.what == "train":
        missing = [name for name in POLICIES if not (FOLDER / f"{name}.safetensors").exists()]
        for name in options.names or missing:
            train(name)
    text = table()
    (FOLDER / "README.md").write_text(text)
    print(text)


def command(name: str) -> list[str]:
    return ["rlflame", "train", *POLICIES[name]]


def train(name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        rlflame(*command(name)[1:], "--local", "--quiet", "--out", run,
                "--set", f"evaluation.final_episodes={EPISODES}")  # fmt: skip
        out = FOLDER / f"{name}.safetensors"
        out.unlink(missing_ok=True)
        rlflame("export", f"{run}/latest.safetensors", "--out", str(out))


def rlflame(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "rlflame", *arguments], check=True)


def table() -> str:
    """The page, with one row for each file."""
    from rlflame.storage import checkpoint

    rows = []
    for path in sorted(FOLDER.glob("*.safetensors")):
        found = checkpoint.load(path)
        record = found.evaluation
        assert record is not None, path
        rows.append(
            f"| [{path.name}]({path.name}) | {found.env.id} | {record.mean:,.1f} | "
            f"{record.low:,.1f} to {record.high:,.1f} | "
            f"{format_rank(path.stem, found.recipe.learning.seed)} | {found.progress.steps:,} | "
            f"{path.stat().st_size / 1000:.0f} | `{' '.join(command(path.stem))}` |"
        )
    return _HEAD.format(episodes=EPISODES) + "\n".join(rows) + "\n"


def format_rank(name: str, seed: int) -> str:
    """The place of a seed among the final evaluations of its study, or nothing without a study."""
    if name not in RANKED:
        return ""
    with RECORD.open(newline="") as file:
        returns = {
            int(row["seed"]): float(row["return_mean"])
            for row in csv.DictReader(file)
            if (row["study"], row["final"]) == (f"ppo-{name}-1m", "1")
        }
    place = sorted(returns.values(), reverse=True).index(returns[seed]) + 1
    return f"{place} of {len(returns)}"


if __name__ == "__main__":
    ended(main)
