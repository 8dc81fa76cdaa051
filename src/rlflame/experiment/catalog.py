"""What there is to choose from: environments with their sizes, and settings with their ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rlflame.config import resolve
from rlflame.config.algorithms import TRAITS
from rlflame.config.recipe import EnvironmentSettings, RunConfig
from rlflame.config.validation import walk_settings
from rlflame.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
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


def list_environments() -> list[EnvironmentEntry]:
    """All aliases, looked at as they are installed here."""
    from rlflame.experiment.components import inspect_env  # loads numpy

    entries = []
    for alias, target in resolve.ALIASES.items():
        presets = {name: resolve.choose_preset(target.id, name) for name in TRAITS}
        names = tuple(presets.values())
        try:
            spec = inspect_env(EnvironmentSettings(id=target.id))
        except ConfigError as error:
            entries.append(
                EnvironmentEntry(alias, target.id, None, None, None, names, problem=error.message)
            )
            continue
        continuous = spec.action_kind == "continuous"
        if not continuous:
            names = tuple(presets[name] for name in presets if TRAITS[name].discrete_actions)
        sizes = spec.observation_size, spec.action_size
        entries.append(EnvironmentEntry(alias, target.id, *sizes, continuous, names))
    return entries


@dataclass(frozen=True, slots=True)
class Setting:
    """One knob: its full name, what it may be, what it is unless set, and what it means."""

    name: str
    range: str
    default: Any
    description: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_settings() -> list[Setting]:
    """Every setting there is, read from the config model."""
    return [
        Setting(
            name,
            _format_type(field.annotation, field.metadata),
            field.get_default(call_default_factory=True),
            field.description or "",
        )
        for name, field in walk_settings(RunConfig)
    ]


def _format_type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type and its bounds: `integer >= 1 and <= 4096 | none`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _format_type(inner[0], [*annotation.__metadata__, *metadata])
    if origin is Literal:
        return " | ".join(str(value) for value in inner)
    if origin in (Union, UnionType):
        member_types = [
            _format_type(member, metadata) for member in inner if member is not NoneType
        ]
        return " | ".join([*member_types, "none"] if NoneType in inner else member_types)
    if origin is tuple:
        return f"list of {_format_type(inner[0])}"
    if origin is dict:
        return "table"
    name = {int: "integer", float: "number", str: "text", bool: "true | false"}[annotation]
    bounds = " and ".join(_format_bounds(metadata))
    return f"{name} {bounds}".strip()


def _format_bounds(metadata: Sequence[Any]) -> list[str]:
    constraints: list[Any] = []
    for constraint in metadata:
        # Inside an Annotated the bounds may come as they are or in a Field.
        constraints += constraint.metadata if isinstance(constraint, FieldInfo) else [constraint]
    bounds = {
        sign: getattr(constraint, name)
        for sign, name in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt"))
        for constraint in constraints
        if getattr(constraint, name, None) is not None
    }
    return [f"{sign} {_format_bound(value)}" for sign, value in bounds.items()]


def _format_bound(value: float) -> str:
    return "2^63" if value == 2**63 else f"{value:,}" if isinstance(value, int) else f"{value:g}"
