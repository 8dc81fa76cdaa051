"""Validates configs, names the setting in each error, and finds settings by name."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rlflame.config import toml_io
from rlflame.config.algorithms import TRAITS
from rlflame.config.recipe import RunConfig
from rlflame.config.synonyms import find_synonyms, format_synonym_hint
from rlflame.errors import ConfigError

_SHOULD = "Input should "
#: Settings whose names are less similar than this (0 to 1) are not suggested.
_LEAST_LIKENESS = 0.5
#: Descriptions of the texts that patterns of settings allow.
_PATTERN_CHOICES = {
    "runtime.flame.memory": "a size such as 2g",
    "runtime.flame.python_version": "a version such as 3.12",
}


def validate_config(data: Mapping[str, Any]) -> RunConfig:
    """Validate a config; errors show the setting, its description and its value."""
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise make_error(error) from error
    environment = config.learning.environment
    arguments = [environment.kwargs, *(wrapper.kwargs for wrapper in environment.wrappers)]
    for name, value in (item for kwargs in arguments for item in kwargs.items()):
        if not _is_json_value(value):
            raise ConfigError(
                f"The environment argument {name} = {value!r:.200} cannot be stored in a recipe.",
                "use strings, finite numbers of at most 64 bits, true, false, none, and lists and "
                "tables of them",
            )
    return config


def make_error(error: ValidationError) -> ConfigError:
    """Convert a pydantic error to a ConfigError without Python type names."""
    first, *rest = error.errors(include_url=False)
    path = _find_setting(first["loc"])
    if first["type"] == "extra_forbidden":
        return make_unknown_error(path)
    # A setting with several possible types has one error for each of them.
    path_errors = [first, *(other for other in rest if _find_setting(other["loc"]) == path)]
    kinds = {"model_type": "table", "dict_type": "table", "tuple_type": "list"}
    reasons = [
        f"be a {kinds[entry['type']]}{_format_example(path, entry['type'])}"
        if entry["type"] in kinds
        else _PATTERN_CHOICES[path]
        if entry["type"] == "string_pattern_mismatch" and path in _PATTERN_CHOICES
        else entry["msg"]
        for entry in path_errors
    ]
    choices = dict.fromkeys(
        # pydantic also says how it has parsed the value.
        re.split(", (?:unable|got) ", reason.removeprefix(_SHOULD).removeprefix("be "))[0]
        for reason in reasons
    )
    description = list_settings().get(path, "").rstrip(".")
    subject = f"{path} ({description})" if description else path
    if first["type"] == "value_error":
        reason = first["msg"].removeprefix("Value error, ")
        sentence = f"{subject}: {reason}" if subject else reason
    else:
        seen_text, kind = format_seen_value(first["input"]), toml_io.describe_type(first["input"])
        sentence = f"{subject} should be {' or '.join(choices)}, but is {seen_text} ({kind})"
    return ConfigError(f"{sentence}.", "rlflame config lists all settings")


def _format_example(path: str, error_type: str) -> str:
    """Return an example of the value of a setting that must be a list."""
    if error_type != "tuple_type":
        return ""
    default = {name: field.default for name, field in walk_settings(RunConfig)}.get(path)
    return f" such as {toml_io.format_value(list(default or ['NAME']))}"


def make_unknown_error(name: str) -> ConfigError:
    """Return the error for a name that is misspelt or from another rlflame version."""
    message = f"There is no setting {name!r} in this version of rlflame."
    return ConfigError(message, _suggest_settings(name))


def format_seen_value(value: Any) -> str:
    return repr(value) if isinstance(value, str) else toml_io.format_value(value)


def _is_json_value(value: Any) -> bool:
    """Return whether JSON, the format of stored recipes, can represent a value."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(map(_is_json_value, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json_value(inner) for name, inner in value.items())
    if isinstance(value, int):
        return abs(value) < 2**63  # a checkpoint with a larger integer could not be read again
    return value is None or isinstance(value, str)


def parse_set(text: str, algorithm: str | None = None) -> tuple[str, Any]:
    """Parse `ppo.clip_range=0.1` into the setting's full path and its value.

    A short name such as `learning_rate` belongs to the algorithm, if it is given.
    """
    key, equals, value_text = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} is not NAME=VALUE.", "--set ppo.clip_range=0.1")
    name = _find_full_key(key.strip(), algorithm)
    value = parse_option_value("--set", text, value_text)
    if type(value) in (int, float) and _is_text_setting(name):
        value = value_text.strip()  # a Python version such as 3.10 is not the number 3.1
    return name, value


def _is_text_setting(name: str) -> bool:
    """Return whether the value of a setting is a string and never a number."""
    annotations = {path: field.annotation for path, field in walk_settings(RunConfig)}
    kinds = get_args(annotations.get(name)) or (annotations.get(name),)
    return str in kinds and not {int, float}.intersection(kinds)


#: Examples of the values of options.
_VALUE_EXAMPLES = {
    "--set": "hidden=[64, 64]",
    "--wrap": "gymnasium.wrappers:ReshapeObservation,shape=[2, 2]",
}


def parse_option_value(option: str, text: str, value_text: str) -> Any:
    """Parse the value of an option such as `--set NAME=VALUE`."""
    try:
        return toml_io.parse_value(value_text.strip())
    except ValueError as error:
        example = _VALUE_EXAMPLES.get(option, "size=[5, 5]")
        raise ConfigError(f"{option} {text!r:.200}: {error}.", f"{option} '{example}'") from error


def _find_full_key(key: str, algorithm: str | None) -> str:
    head, marker, tail = key.partition("environment.kwargs.")
    if marker and head in ("", "learning."):
        return f"learning.environment.kwargs.{tail}"
    settings = list_settings()
    matches = [key] if key in settings else [p for p in settings if p.endswith(f".{key}")]
    full_key = f"learning.{algorithm}.{key}"
    matches = [full_key] if full_key in matches else matches
    sections = tuple(f"learning.{name}." for name in TRAITS)
    synonyms = find_synonyms(key)
    if synonyms and full_key not in matches and all(path.startswith(sections) for path in matches):
        paths = {
            name: {name, f"learning.{name}", f"learning.{algorithm}.{name}"} for name in synonyms
        }
        names = [name for name in synonyms if not paths[name].isdisjoint(settings)] or synonyms
        raise ConfigError(
            f"There is no setting {key!r}; here it is called {' or '.join(names)}.",
            format_synonym_hint(names),
        )
    if not matches:
        raise make_unknown_error(key)
    if len(matches) > 1:
        raise ConfigError(f"{key!r} is ambiguous: {', '.join(matches)}.", "use a full name")
    return matches[0]


def list_settings() -> dict[str, str]:
    """Return the description of every setting, by full path."""
    return {path: field.description or "" for path, field in walk_settings(RunConfig)}


def walk_settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, FieldInfo) of every setting that is not itself a section."""
    for name, field in model.model_fields.items():
        section = _find_section(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from walk_settings(section, f"{prefix}{name}.")


def _find_section(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a section, which may be optional, or None for a setting."""
    options = [option for option in get_args(annotation) or [annotation] if option is not NoneType]
    first = options[0]
    is_section = len(options) == 1 and isinstance(first, type) and issubclass(first, BaseModel)
    return first if is_section else None


def _find_setting(location: Sequence[int | str]) -> str:
    """Return the setting at an error's location, minus any item or type."""
    path = ".".join(map(str, location))
    return next((name for name in list_settings() if path.startswith(f"{name}.")), path)


def _suggest_settings(key: str) -> str:
    """Return a hint with the settings that are most similar to the key, if any are."""

    def measure_likeness(path: str) -> float:
        names = (path, path.rpartition(".")[2])
        return max(difflib.SequenceMatcher(None, key, name).ratio() for name in names)

    paths = sorted(list_settings(), key=measure_likeness, reverse=True)
    if measure_likeness(paths[0]) < _LEAST_LIKENESS:
        return "rlflame config lists all settings"
    return f"did you mean {', '.join(paths[:3])}?"
