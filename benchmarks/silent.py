"""How much of what learns has fallen silent: the weights that no gradient has reached for long.

    rlflame train --env hopper --algo sac --steps 13000 --out run
    python benchmarks/silent.py run/latest.safetensors

Adam's first moment of a weight without gradients is set to zero after some 600 updates. Behind a
rectifier that is every weight into a unit that no observation excites any more, and every one
out of it.
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
            parser.error(f"{path} is not there")
        for name, share in silent(path).items():
            print(f"{path}: {name} {share:.1%}")


def silent(path: Path) -> dict[str, float]:
    """By optimiser, the share of its moments that are zero."""
    with safe_open(path, framework="numpy") as file:
        moments = {name: file.get_tensor(name) for name in file.keys()  # noqa: SIM118
                   if name.endswith("adam.first")}  # fmt: skip
    return {name.split(".")[-2]: float(np.mean(values == 0.0)) for name, values in moments.items()}


if __name__ == "__main__":
    ended(main)
