"""Train the policies that ship in checkpoints/, and write their table from the files themselves.

    python benchmarks/policies.py train [NAME...]     # those that are missing, or these
    python benchmarks/policies.py table               # checkpoints/README.md

Each is the last policy of one run of a preset, scored on 100 episodes and exported without its
optimizer. The seed is one of those tried; a table of many seeds is in docs/results.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from script import ended

FOLDER = Path(__file__).resolve().parent.parent / "checkpoints"
EPISODES = 100
#: Name, and what `rlflame train` is told for it.
POLICIES: dict[str, list[str]] = {
    "cartpole": ["--env", "cartpole", "--seed", "0"],
    "pendulum": ["--env", "pendulum", "--algo", "sac", "--seed", "0"],
    "lunarlander": ["--env", "lunarlander", "--seed", "0"],
    "hopper": ["--env", "hopper", "--seed", "0"],
    "halfcheetah": ["--env", "halfcheetah", "--seed", "5"],
    "walker2d": ["--env", "walker2d", "--seed", "9"],
    "ant": ["--env", "ant", "--seed", "7"],
}

_HEAD = """# Policies to try

Small files of trained policies, made by this project's own presets. They hold the weights, the
recipe and the recorded evaluation, and nothing that is executed on loading.

```
rlflame eval checkpoints/hopper.safetensors --expect-recorded
rlflame render checkpoints/hopper.safetensors -o hopper.gif --vs-untrained
```

The first runs the recorded episodes again: bit-equal on a machine with the same fingerprint,
otherwise it says whether the intervals overlap. Returns are means over {episodes} episodes without
exploration, with 95% bootstrap intervals. Each is one seed of ten: by
their ends Ant's is the best, Hopper's and Walker2d's are the third and HalfCheetah's is the fifth;
of the others it is seed 0, as it came. What a preset reaches over many is in
[docs/results.md](../docs/results.md). This table is made from the files by
`python benchmarks/policies.py table`.

| file | environment | return | 95% interval | steps | kB | command |
|---|---|---|---|---|---|---|
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
    """One row a file, of what the file itself says."""
    from rlflame.storage import checkpoint

    rows = []
    for path in sorted(FOLDER.glob("*.safetensors")):
        found = checkpoint.load(path)
        record = found.evaluation
        assert record is not None, path
        rows.append(
            f"| [{path.name}]({path.name}) | {found.env.id} | {record.mean:,.1f} | "
            f"{record.low:,.1f} to {record.high:,.1f} | {found.progress.steps:,} | "
            f"{path.stat().st_size / 1000:.0f} | `{' '.join(command(path.stem))}` |"
        )
    return _HEAD.format(episodes=EPISODES) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    ended(main)
