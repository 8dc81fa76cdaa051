"""Lists and reads the presets, and the short names of the environments that they are for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from rlflame.config import toml_io
from rlflame.config.algorithms import TRAITS
from rlflame.config.nested_dict import get_nested, set_nested
from rlflame.errors import ConfigError

_PRESETS = resources.files("rlflame.config") / "presets"


class Alias(NamedTuple):
    """The Gymnasium id of a short name, and the family whose presets fit it."""

    id: str
    family: str


#: Families of presets, and the ids that they fit.
_FAMILIES = {
    "cartpole": "CartPole-v1",
    "pendulum": "Pendulum-v1",
    "default": "Acrobot-v1 MountainCar-v0 MountainCarContinuous-v0 Reacher-v5 Blackjack-v1 "
    "CliffWalking-v1 FrozenLake-v1 Taxi-v4",
    "lunarlander": "LunarLander-v3",
    "mujoco": "BipedalWalker-v3 Hopper-v5 HalfCheetah-v5 Walker2d-v5 Ant-v5 Humanoid-v5 Swimmer-v5 "
    "Pusher-v5 InvertedPendulum-v5 InvertedDoublePendulum-v5",
}
#: An alias is an id without its version, in lower case.
ALIASES: dict[str, Alias] = {
    id.partition("-")[0].lower(): Alias(id, family)
    for family, ids in _FAMILIES.items()
    for id in ids.split()
}
_ALIAS_BY_ID = {alias.id: name for name, alias in ALIASES.items()}


def resolve_env_id(name: str) -> str:
    """Return the Gymnasium id for an alias, or the id itself."""
    return ALIASES[name.lower()].id if name.lower() in ALIASES else name


def make_short_name(id: str) -> str:
    """Return the alias of an id, or the id as a valid folder name."""
    return _ALIAS_BY_ID.get(id) or re.sub(r"[^\w.-]", "-", id).lower()


def list_presets() -> list[str]:
    return sorted(f.name[:-5] for f in _PRESETS.iterdir() if f.name.endswith(".toml"))


def choose_preset(id: str, algorithm: str) -> str:
    """Return the most specific preset: for the id, its family or only the algorithm."""
    alias = _ALIAS_BY_ID.get(id)
    names = [alias, ALIASES[alias].family] if alias else []
    candidates = [f"{name}-{algorithm}" for name in (*names, "default")]
    return next(name for name in candidates if name in list_presets())


def read_preset(name: str) -> dict[str, Any]:
    return toml_io.parse((_PRESETS / f"{name}.toml").read_text("utf-8"))


def list_fitting_presets(id: str, algorithms: Sequence[str]) -> list[str]:
    """List the presets for an environment, its family or any environment."""
    alias = _ALIAS_BY_ID.get(id)
    names = {*TRAITS, "default", *((alias, ALIASES[alias].family) if alias else ())}
    return [
        preset
        for preset in list_presets()
        if preset.partition("-")[0] in names
        and get_nested(read_preset(preset), "learning.algorithm") in algorithms
    ]


def _find_similar_preset(name: str) -> str:
    return next(iter(difflib.get_close_matches(name, list_presets(), 1)), name)


def read_named_preset(name: str | None, user_layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset of `--preset`, with the environment that its name begins with."""
    if name is None:
        return {}
    similar = name if name in list_presets() else _find_similar_preset(name)
    first = similar.partition("-")[0]
    id = get_nested(user_layer, "learning.environment.id") or first
    id = resolve_env_id(id) if isinstance(id, str) else first
    if name not in list_presets():
        algorithm = get_nested(user_layer, "learning.algorithm")
        presets = list_fitting_presets(id, [algorithm] if algorithm else list(TRAITS))
        subject = id if id in _ALIAS_BY_ID else "any environment"
        subject += f" and {algorithm}" if algorithm else ""
        raise ConfigError(
            f"There is no preset {name!r}.", f"presets for {subject}: {', '.join(presets)}"
        )
    layer = read_preset(name)
    if first in ALIASES:
        set_nested(layer, "learning.environment.id", ALIASES[first].id)
    elif first in _FAMILIES and first != "default" and id == first:
        raise ConfigError(
            f"The preset {name} is for several environments.",
            f"name one of them: --env {_FAMILIES[first].split()[1].partition('-')[0].lower()}",
        )
    return layer
