"""Print the share of weights that have not received a gradient for a long time.

    rlflame train --env hopper --algo sac --steps 13000 --out run
    python benchmarks/silent.py run/latest.safetensors

rlflame sets Adam's first moment to zero after about 600 updates without a gradient. This happens to
all input and output weights of a ReLU unit that no observation activates any more.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from safetensors import safe_open
from script import ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="+")
    paths = parser.parse_args().checkpoint
    for path in paths:
        if not path.is_file():
            parser.error(f"{path} does not exist")
        for name, share in silent(path).items():
            print(f"{path}: {name} {share:.1%}")


def silent(path: Path) -> dict[str, float]:
    """Return the share of zeros in the first moments of each optimizer."""
    with safe_open(path, framework="numpy") as file:
        moments = {name: file.get_tensor(name) for name in file.keys()  # noqa: SIM118
                   if name.endswith("adam.first")}  # fmt: skip
    return {name.split(".")[-2]: float(np.mean(values == 0.0)) for name, values in moments.items()}


if __name__ == "__main__":
    ended(main)
