"""A process that collects with a fleet of its own inside it, as each of several seeds does.

Its order is a `recipe` and a `number` to be added to the recipe's seed. Must not know: what else
runs beside it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlflame.bench.base import Case
from rlflame.bench.process_group import Ordered
from rlflame.bench.rollouts import Collecting, Rate
from rlflame.config.recipe import Recipe
from rlflame.config.runtime import RuntimeSettings
from rlflame.experiment import components
from rlflame.fleet import factory
from rlflame.rollout.envs import user_file
from rlflame.training.stop_signal import NeverStop


def main() -> None:
    here = Ordered()
    user_file.load_told()
    one = case(here.order["recipe"], here.order["number"])
    inside = RuntimeSettings(fleet="inline")
    with factory.fleet(inside) as fleet, Collecting(one, fleet, NeverStop()) as collecting:
        collecting.settle()

        def collect(seconds: float) -> dict[str, Any]:
            rate = Rate("inline", 1)
            collecting.measure(seconds, rate)
            return asdict(rate)

        here.answer(collect)


def case(text: str, number: int) -> Case:
    """What this one of several processes does."""
    recipe = Recipe.model_validate_json(text)
    learning = recipe.learning.model_copy(update={"seed": recipe.learning.seed + number})
    env = components.environment(learning.environment)
    return Case("alone", recipe.model_copy(update={"learning": learning}), env)


if __name__ == "__main__":
    main()
