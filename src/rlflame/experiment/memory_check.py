"""The memory that a recipe needs on an environment, and whether this machine has it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlflame.config.recipe import LearningSettings, Recipe
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.errors import ConfigError
from rlflame.experiment.components import make_policy_spec
from rlflame.rollout.policy import compute_array_shapes
from rlflame.rollout.task import EnvSpec
from rlflame.storage.available_memory import measure_usable_bytes
from rlflame.terminal_text import format_count, format_size

#: Of a step in memory: what was collected, and the same in another order.
_COPIES = 2
#: Numbers for each weight: itself, its gradient and the two moments of Adam.
_NUMBERS_PER_WEIGHT = 4
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Requirement:
    """Something large, the bytes that it takes at least, and a setting that makes it smaller."""

    subject: str
    nbytes: int
    remedy: str | None


def check_memory(recipe: Recipe, env: EnvSpec, *, resumed: bool) -> None:
    """Refuse what the machine cannot hold, before minutes or hours have filled it."""
    available, safe = measure_usable_bytes()
    for requirement in _estimate(recipe, env, available, safe):
        if requirement.nbytes > available:
            verb = "resume" if resumed else "train"
            fallback = f"free some, raise a limit, or {verb} on another machine"
            raise ConfigError(
                f"{requirement.subject} takes {format_size(requirement.nbytes)} of memory, and "
                f"{format_size(available)} are available for it.",
                fallback
                if resumed or requirement.remedy is None
                else f"--set learning.{requirement.remedy}",
            )


def _estimate(recipe: Recipe, env: EnvSpec, available: int, safe: int) -> Iterator[_Requirement]:
    learning, rollout = recipe.learning, recipe.learning.rollout
    replay = RecipeSummary(recipe, env, "").replay
    if replay is not None:
        transitions = format_count(replay.rows * replay.columns, "transition")
        fitting = replay.find_capacity(safe)
        remedy = f"{learning.algorithm}.buffer_size={_round_down(fitting)}"
        enough = fitting >= rollout.columns
        yield _Requirement(f"A replay of {transitions}", replay.nbytes, remedy if enough else None)
    elif rollout.unit == "steps":  # the length of episodes is not known
        action = env.action_size if env.action_kind == "continuous" else 1
        numbers = (env.observation_size + action + 4) * rollout.columns
        bytes_per_step = _COPIES * _FLOAT_BYTES * numbers
        fitting = available // bytes_per_step // 2
        yield _Requirement(
            f"A batch of {format_count(rollout.steps_per_iteration, 'step')}",
            bytes_per_step * rollout.steps,
            f"rollout.steps={_round_down(fitting)}" if fitting else None,
        )
    yield _estimate_networks(learning, env)


def _estimate_networks(learning: LearningSettings, env: EnvSpec) -> _Requirement:
    shapes = compute_array_shapes(make_policy_spec(learning, env)).values()
    weights = sum(math.prod(shape) for shape in shapes) * (1 + learning.traits.critics)
    return _Requirement(
        f"Learning networks of {list(learning.network.hidden)} units",
        _FLOAT_BYTES * _NUMBERS_PER_WEIGHT * weights,
        "network.hidden=[256,256]",
    )


def _round_down(number: int) -> int:
    """The number rounded down to two digits, which leaves something over."""
    unit: int = 10 ** max(0, len(str(number)) - 2)
    return number // unit * unit
