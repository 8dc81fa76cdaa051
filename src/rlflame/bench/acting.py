"""A process that collects with a fleet of its own inside it, as each of several seeds does.

    python -m rlflame.bench.acting RECIPE.json NUMBER SECONDS

The recipe is the file's with NUMBER added to its seed. It says `ready`, then for each line on
standard input collects for so long and answers with a line of JSON. Must not know: what else runs
beside it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rlflame import build, fleets
from rlflame.bench import Case
from rlflame.bench.rollouts import Collecting, Rate
from rlflame.config import Recipe
from rlflame.rollout import own
from rlflame.runtime import RuntimeSettings
from rlflame.stop import NeverStop


def main() -> None:
    file, number, seconds = sys.argv[1:]
    own.load_told()
    one = case(Path(file), int(number))
    inside = RuntimeSettings(fleet="inline")
    with fleets.fleet(inside) as fleet, Collecting(one, fleet, NeverStop()) as collecting:
        collecting.settle()
        print("ready", flush=True)
        for _ in sys.stdin:
            rate = Rate("inline", 1)
            collecting.measure(float(seconds), rate)
            print(json.dumps(asdict(rate)), flush=True)


def case(file: Path, number: int) -> Case:
    """What this one of several processes does."""
    recipe = Recipe.model_validate_json(file.read_text())
    learning = recipe.learning.model_copy(update={"seed": recipe.learning.seed + number})
    env = build.environment(learning.environment)
    return Case("alone", recipe.model_copy(update={"learning": learning}), env)


if __name__ == "__main__":
    main()
