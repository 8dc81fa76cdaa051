"""A process that collects with a fleet of its own inside it, as each of several seeds does.

Its order is a `recipe` and a `number` to be added to the recipe's seed. Must not know: what else
runs beside it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlflame.bench.base import Case
from rlflame.bench.rollouts import RolloutRate, TimedRounds
from rlflame.bench.stepping_processes import StepServer
from rlflame.config.recipe import Recipe
from rlflame.config.runtime import RuntimeSettings
from rlflame.experiment import components
from rlflame.fleet import factory
from rlflame.rollout.envs import user_code
from rlflame.training.stop_signal import NullStop


def main() -> None:
    server = StepServer()
    user_code.load_from_environment()
    bench_case = make_case(server.order["recipe"], server.order["number"])
    inside = RuntimeSettings(fleet="inline")
    with (
        factory.make_fleet(inside) as fleet,
        TimedRounds(bench_case, fleet, NullStop()) as collecting,
    ):
        collecting.warm_up()

        def collect(seconds: float) -> dict[str, Any]:
            rate = RolloutRate("inline", 1)
            collecting.measure(seconds, rate)
            return asdict(rate)

        server.serve(collect)


def make_case(text: str, number: int) -> Case:
    """What this one of several processes does."""
    recipe = Recipe.model_validate_json(text)
    learning = recipe.learning.model_copy(update={"seed": recipe.learning.seed + number})
    env = components.make_env_spec(learning.environment)
    return Case("alone", recipe.model_copy(update={"learning": learning}), env)


if __name__ == "__main__":
    main()
