"""From what a user typed to a RunConfig: aliases, presets, files, `--set` and flags, in order.

Precedence: flag > --set > --config > preset > default. In TOML, which has no null, the word
"none" stands for an absent value. Must not know: how a config is run or shown.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rlflame.config import RunConfig
from rlflame.errors import ConfigError

NONE = "none"


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name, the Gymnasium id behind it, and the family whose presets suit it."""

    id: str
    family: str


ALIASES: dict[str, Alias] = {
    "cartpole": Alias("CartPole-v1", "cartpole"),
    "pendulum": Alias("Pendulum-v1", "pendulum"),
    "acrobot": Alias("Acrobot-v1", "default"),
    "mountaincar": Alias("MountainCar-v0", "default"),
    "lunarlander": Alias("LunarLander-v3", "lunarlander"),
    "bipedalwalker": Alias("BipedalWalker-v3", "mujoco"),
    "hopper": Alias("Hopper-v5", "mujoco"),
    "halfcheetah": Alias("HalfCheetah-v5", "mujoco"),
    "walker2d": Alias("Walker2d-v5", "mujoco"),
    "ant": Alias("Ant-v5", "mujoco"),
    "humanoid": Alias("Humanoid-v5", "mujoco"),
    "swimmer": Alias("Swimmer-v5", "mujoco"),
    "reacher": Alias("Reacher-v5", "mujoco"),
    "pusher": Alias("Pusher-v5", "mujoco"),
    "invertedpendulum": Alias("InvertedPendulum-v5", "mujoco"),
    "inverteddoublependulum": Alias("InvertedDoublePendulum-v5", "mujoco"),
}
_BY_ID = {alias.id: name for name, alias in ALIASES.items()}


def environment_id(name: str) -> str:
    """The Gymnasium id that a user's word stands for."""
    alias = ALIASES.get(name.lower())
    return alias.id if alias else name


def short_name(id: str) -> str:
    """The alias of an id, or the id as a word that can name a folder."""
    return _BY_ID.get(id) or "".join(c if c.isalnum() or c in "-_." else "-" for c in id).lower()


def preset_names() -> list[str]:
    folder = resources.files(__name__)
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".toml"))


def preset_for(id: str, algorithm: str) -> str:
    """The preset that suits an environment, or the default one of the algorithm."""
    family = ALIASES[_BY_ID[id]].family if id in _BY_ID else "default"
    name = f"{family}-{algorithm}"
    return name if name in preset_names() else f"default-{algorithm}"


def read_preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        close = difflib.get_close_matches(name, preset_names(), n=3)
        raise ConfigError(
            f"There is no preset {name!r}.", f"presets: {', '.join(close or preset_names())}"
        )
    return tomllib.loads((resources.files(__name__) / f"{name}.toml").read_text("utf-8"))


def resolve(
    *,
    environment: str | None = None,
    algorithm: str | None = None,
    preset: str | None = None,
    config_file: Path | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    continuous: Callable[[str], bool],
) -> tuple[RunConfig, str]:
    """The config of a run and the name of the preset under it.

    A preset may hold a part named `continuous`, laid over the rest where `continuous(id)` says
    that the environment's actions are.
    """
    from_file = read_file(config_file) if config_file else {}
    from_sets: dict[str, Any] = {}
    for text in sets:
        key, value = parse_set(text)
        put(from_sets, key, value)
    above = merge(from_file, from_sets)
    chosen = read_preset(preset) if preset else {}
    named = environment_id(environment) if environment else None
    id = named or get(above, "learning.environment.id") or get(chosen, "learning.environment.id")
    id = id or ALIASES["cartpole"].id
    method = algorithm or get(above, "learning.algorithm") or get(chosen, "learning.algorithm")
    method = method or "ppo"
    preset = preset or preset_for(id, method)
    layers = merge(read_preset(preset), from_file)
    overlay = layers.pop("continuous", None)
    if overlay is not None and continuous(id):
        layers = merge(merge(read_preset(preset), overlay), from_file)
        layers.pop("continuous")
    layers = merge(layers, from_sets)
    if get(chosen or above, "learning.algorithm") not in (None, method):
        raise ConfigError(
            f"The preset or file is for {get(chosen or above, 'learning.algorithm')}, "
            f"and --algo says {method}.",
            f"leave out --algo, or use --preset {preset_for(id, method)}",
        )
    put(layers, "learning.environment.id", id)
    put(layers, "learning.algorithm", method)
    for key, value in (flags or {}).items():
        put(layers, key, value)
    return validated(layers), preset


def validated(data: Mapping[str, Any]) -> RunConfig:
    """The config, or a sentence that names the field, its meaning and the value seen."""
    try:
        return RunConfig.model_validate(without_none(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"There is no setting {path!r}.", _did_you_mean(path)) from error
        seen = "" if first["type"] == "value_error" else f", seen {first['input']!r}"
        about = leaves().get(path)
        meaning = f" ({about})" if about else ""
        subject = f"{path}{meaning}: " if path else ""
        raise ConfigError(f"{subject}{message}{seen}.", "rlflame config lists all") from error


def read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", "check --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.", "check --config") from error


def parse_set(text: str) -> tuple[str, Any]:
    """`ppo.clip_range=0.1` -> the full path of the one setting that ends so, and its value."""
    key, equals, written = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} is not NAME=VALUE.", "--set ppo.clip_range=0.1")
    return full_key(key.strip()), parse_value(written.strip())


def parse_value(written: str) -> Any:
    """A TOML value, or else the text itself, so that plain words need no quotes."""
    try:
        return tomllib.loads(f"x = {written}")["x"]
    except tomllib.TOMLDecodeError:
        return written


def full_key(key: str) -> str:
    head, found, tail = key.partition("environment.kwargs.")
    if found and head in ("", "learning."):
        return f"learning.environment.kwargs.{tail}"
    matches = [path for path in leaves() if path == key or path.endswith("." + key)]
    if len(matches) == 1:
        return matches[0]
    if key in matches:
        return key
    if matches:
        raise ConfigError(f"{key!r} could be any of {', '.join(matches)}.", "write one out")
    raise ConfigError(f"There is no setting {key!r}.", _did_you_mean(key))


def leaves() -> dict[str, str]:
    """Every setting by its full path, with its explanation."""
    return {path: field.description or "" for path, field in walk(RunConfig)}


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, FieldInfo) of every setting that is not itself a section."""
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from walk(section, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]
    real = [option for option in options if option is not NoneType]
    if len(real) == 1 and isinstance(real[0], type) and issubclass(real[0], BaseModel):
        return real[0]
    return None


def _did_you_mean(key: str) -> str:
    last = key.rsplit(".", 1)[-1]
    by_last = {path.rsplit(".", 1)[-1]: path for path in leaves()}
    close = difflib.get_close_matches(last, by_last, n=3, cutoff=0.5)
    known = ", ".join(by_last[name] for name in close)
    return f"did you mean {known}?" if known else "rlflame config lists all settings"


def get(data: Mapping[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def put(data: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        inner = data.get(part)
        if not isinstance(inner, dict):
            inner = data[part] = {}
        data = inner
    data[last] = value


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def without_none(data: Mapping[str, Any]) -> dict[str, Any]:
    """The word for an absent value becomes one."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            result[key] = without_none(value)
        else:
            result[key] = None if value == NONE else value
    return result


def to_toml(config: BaseModel) -> str:
    """A config as the TOML that reads back as the same config."""
    lines: list[str] = []
    _write_table(config.model_dump(mode="json"), "", lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: Mapping[str, Any], path: str, lines: list[str]) -> None:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in inner}
    if path and (plain or not inner):
        lines += ["", f"[{path}]"]
    absent_sections = {"ppo", "reinforce"}
    for key, value in plain.items():
        if value is None and key in absent_sections:
            continue
        lines.append(f"{_toml_key(key)} = {_toml_value(value)}")
    for key, value in inner.items():
        _write_table(value, f"{path}.{_toml_key(key)}" if path else _toml_key(key), lines)


def _toml_key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else _toml_value(key)


def _toml_value(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    escaped = "".join(
        f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c
        for c in str(value).replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'
