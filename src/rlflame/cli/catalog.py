"""What there is to choose from: environments with their sizes, and settings with their ranges.

Must not know: display.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rlflame.config import resolve
from rlflame.config.recipe import EnvironmentSettings, RunConfig
from rlflame.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Environment:
    """An alias, what it stands for, and the presets that suit it."""

    alias: str
    id: str
    observations: int | None
    actions: int | None
    continuous: bool | None
    presets: tuple[str, ...]
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def environments() -> list[Environment]:
    """All aliases, looked at as they are installed here."""
    from rlflame.experiment.env_spec import look_at  # loads Gymnasium

    found = []
    for alias, meant in resolve.ALIASES.items():
        names = tuple(resolve.preset_for(meant.id, method) for method in resolve.ALGORITHMS)
        try:
            spec = look_at(EnvironmentSettings(id=meant.id))
        except ConfigError as error:
            found.append(
                Environment(alias, meant.id, None, None, None, names, problem=error.message)
            )
            continue
        continuous = spec.action_kind == "continuous"
        if not continuous:
            names = tuple(name for name in names if not name.endswith("-sac"))
        sizes = spec.observation_size, spec.action_size
        found.append(Environment(alias, meant.id, *sizes, continuous, names))
    return found


@dataclass(frozen=True, slots=True)
class Setting:
    """One knob: its full name, what it may be, what it is unless set, and what it means."""

    name: str
    range: str
    default: Any
    description: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def settings() -> list[Setting]:
    """Every setting there is, read from the config model."""
    return [
        Setting(
            name,
            _words(field.annotation, field.metadata),
            field.get_default(call_default_factory=True),
            field.description or "",
        )
        for name, field in resolve.walk(RunConfig)
    ]


def _words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type and its bounds: `integer >= 1 and <= 4096 | none`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _words(inner[0], [*annotation.__metadata__, *metadata])
    if origin is Literal:
        return " | ".join(str(value) for value in inner)
    if origin in (Union, UnionType):
        words = [_words(each, metadata) for each in inner if each is not NoneType]
        return " | ".join([*words, "none"] if NoneType in inner else words)
    if origin is tuple:
        return f"list of {_words(inner[0])}"
    if origin is dict:
        return "table"
    name = {int: "integer", float: "number", str: "text", bool: "true | false"}[annotation]
    bounds = " and ".join(_bounds(metadata))
    return f"{name} {bounds}".strip()


def _bounds(metadata: Sequence[Any]) -> list[str]:
    constraints: list[Any] = []
    for each in metadata:
        # Inside an Annotated the bounds may come as they are or in a Field.
        constraints += each.metadata if isinstance(each, FieldInfo) else [each]
    found = {
        sign: getattr(each, name)
        for sign, name in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt"))
        for each in constraints
        if getattr(each, name, None) is not None
    }
    return [f"{sign} {_bound(value)}" for sign, value in found.items()]


def _bound(value: float) -> str:
    return "2^63" if value == 2**63 else f"{value:,}" if isinstance(value, int) else f"{value:g}"
