"""From what a user typed to a RunConfig: aliases, presets, files, `--set` and flags, in order.

Precedence: flag > --set > --config > preset > default. Must not know: how a config is run or
shown, how TOML is read or written.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rlflame.config import toml_io
from rlflame.config.module_trust import allow_modules, check_modules
from rlflame.config.nested import get_nested, merge, set_nested
from rlflame.config.recipe import EvaluationSettings, LearningSettings, RunConfig
from rlflame.errors import ConfigError, format_command, format_shell
from rlflame.rollout.envs.user_code import find_named_modules

_SHOULD = "Input should "
PACKAGES = "runtime.flame.extra_dependencies"
_PRESETS = resources.files("rlflame.config") / "presets"


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
    "mountaincarcontinuous": Alias("MountainCarContinuous-v0", "default"),
    "lunarlander": Alias("LunarLander-v3", "lunarlander"),
    "bipedalwalker": Alias("BipedalWalker-v3", "mujoco"),
    "hopper": Alias("Hopper-v5", "mujoco"),
    "halfcheetah": Alias("HalfCheetah-v5", "mujoco"),
    "walker2d": Alias("Walker2d-v5", "mujoco"),
    "ant": Alias("Ant-v5", "mujoco"),
    "humanoid": Alias("Humanoid-v5", "mujoco"),
    "swimmer": Alias("Swimmer-v5", "mujoco"),
    "reacher": Alias("Reacher-v5", "default"),
    "pusher": Alias("Pusher-v5", "mujoco"),
    "invertedpendulum": Alias("InvertedPendulum-v5", "mujoco"),
    "inverteddoublependulum": Alias("InvertedDoublePendulum-v5", "mujoco"),
}
ALGORITHMS: tuple[str, ...] = get_args(LearningSettings.model_fields["algorithm"].annotation)
_ALIAS_BY_ID = {alias.id: name for name, alias in ALIASES.items()}


def resolve_env_id(name: str) -> str:
    """The Gymnasium id that a user's word stands for."""
    alias = ALIASES.get(name.lower())
    return alias.id if alias else name


def make_short_name(id: str) -> str:
    """The alias of an id, or the id as a word that can name a folder."""
    return (
        _ALIAS_BY_ID.get(id) or "".join(c if c.isalnum() or c in "-_." else "-" for c in id).lower()
    )


def list_presets() -> list[str]:
    return sorted(f.name[:-5] for f in _PRESETS.iterdir() if f.name.endswith(".toml"))


def choose_preset(id: str, algorithm: str) -> str:
    """The environment's own preset, or its family's, or the default one of the algorithm."""
    presets = list_presets()
    names = (_ALIAS_BY_ID[id], ALIASES[_ALIAS_BY_ID[id]].family) if id in _ALIAS_BY_ID else ()
    for prefix in names:
        if f"{prefix}-{algorithm}" in presets:
            return f"{prefix}-{algorithm}"
    return f"default-{algorithm}"


def read_preset(name: str) -> dict[str, Any]:
    if name not in list_presets():
        close = difflib.get_close_matches(name, list_presets(), n=3)
        raise ConfigError(
            f"There is no preset {name!r}.", f"presets: {', '.join(close or list_presets())}"
        )
    return toml_io.parse((_PRESETS / f"{name}.toml").read_text("utf-8"))


def resolve(
    *,
    environment: str | None = None,
    algorithm: str | None = None,
    preset: str | None = None,
    config_file: Path | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    continuous: Callable[[RunConfig], bool],
) -> tuple[RunConfig, str]:
    """The config of a run and the name of the preset under it.

    A preset may hold a part named `continuous`, laid over the rest where `continuous(config)` says
    that the actions of the config's environment are.
    """
    flag_layer: dict[str, Any] = {}
    for key, value in (flags or {}).items():
        set_nested(flag_layer, key, value)
    if environment:
        set_nested(flag_layer, "learning.environment.id", environment)
    if algorithm:
        set_nested(flag_layer, "learning.algorithm", algorithm)
    set_layer: dict[str, Any] = {}
    for text in sets:
        set_nested(set_layer, *parse_set(text))
    file_layer = toml_io.read_file(config_file) if config_file else {}
    if config_file and "job" in file_layer:
        raise ConfigError(
            f"{config_file} is of a job of several seeds, and not the config of a run.",
            f"{format_command('resume', config_file.parent)} takes it up",
        )
    _check_tables(RunConfig, file_layer)
    resolve_paths(set_layer, Path.cwd())
    if config_file:
        resolve_paths(file_layer, config_file.parent)
    user_layer = merge_layers(merge_layers(file_layer, set_layer), flag_layer)
    env_file = get_nested(file_layer, "runtime.env_file")
    if (
        isinstance(env_file, str)
        and get_nested(merge_layers(set_layer, flag_layer), "runtime.env_file") is None
    ):
        raise ConfigError(
            f"{config_file} names the environment file {env_file}, and loading it runs its code.",
            f"if you trust it, add {format_shell('--env-file', env_file)}",
        )
    check_packages(file_layer, merge_layers(set_layer, flag_layer), f"{config_file}")
    for layer in (set_layer, flag_layer):  # what the user typed, and not what a file says
        kwargs = get_nested(layer, "learning.environment.kwargs")
        id = get_nested(layer, "learning.environment.id")
        allow_modules(
            find_named_modules(
                id if isinstance(id, str) else "", kwargs if isinstance(kwargs, Mapping) else {}
            )
        )

    preset_layer = read_preset(preset) if preset else {}
    algorithm_name = (
        get_nested(user_layer, "learning.algorithm")
        or get_nested(preset_layer, "learning.algorithm")
        or "ppo"
    )
    id = get_nested(user_layer, "learning.environment.id")
    if id is None:
        id = ALIASES["cartpole"].id
    if not isinstance(id, str) or not id:
        raise ConfigError(f"{_format_value(id)} is no environment's id.", "--env hopper")
    id = resolve_env_id(id)
    if algorithm_name not in ALGORITHMS:
        names = " or ".join(ALGORITHMS)
        raise ConfigError(f"There is no algorithm {algorithm_name!r}.", f"--algo {names}")
    set_nested(user_layer, "learning.environment.id", id)
    set_nested(user_layer, "learning.algorithm", algorithm_name)
    for source, source_layer in (
        (f"the preset {preset}", preset_layer),
        (f"{config_file}", file_layer),
    ):
        source_algorithm = get_nested(source_layer, "learning.algorithm")
        if source_algorithm not in (None, algorithm_name):
            raise ConfigError(
                f"The algorithm is to be {algorithm_name}, and {source} is for {source_algorithm}.",
                f"leave one of them out, or use --preset {choose_preset(id, str(algorithm_name))}",
            )
    name = preset or choose_preset(id, algorithm_name)
    base_layer = read_preset(name)
    overlay = base_layer.pop("continuous", None)
    config = validate_config(merge_layers(base_layer, user_layer))
    check_modules(config.learning.environment.id, config.learning.environment.kwargs)
    if overlay is not None and continuous(config):
        config = validate_config(merge_layers(merge_layers(base_layer, overlay), user_layer))
    _check_until_return(config.evaluation)
    return config, name


def check_packages(
    file_settings: Mapping[str, Any], typed_in: Mapping[str, Any], file: str
) -> None:
    """Refuse packages that only a file asks executors to install: installing one runs its code."""
    packages = get_nested(file_settings, PACKAGES)
    if packages and get_nested(typed_in, PACKAGES) is None:
        raise ConfigError(
            f"{file} asks executors to install {toml_io.format_value(packages)}, and installing a "
            "package "
            "runs its code.",
            "if you trust them, add "
            f"{format_shell('--set', f'{PACKAGES}={toml_io.format_value(packages)}')}, "
            f"or without them {format_shell('--set', f'{PACKAGES}=[]')}",
        )


def _check_until_return(evaluation: EvaluationSettings) -> None:
    """What could never end a run, or would end it by chance; files of before may have either."""
    if evaluation.until_return is None:
        return
    if evaluation.every_steps is None:
        raise ConfigError(
            "--until-return (evaluation.until_return) looks at evaluations during training, and "
            "there are none.",
            "--set evaluation.every_steps=50000",
        )
    if evaluation.episodes == 1:
        raise ConfigError(
            "--until-return (evaluation.until_return) looks at an evaluation's 95% interval, and "
            "one episode has none.",
            "--set evaluation.episodes=8",
        )


def _check_tables(model: type[BaseModel], layer: Mapping[str, Any], prefix: str = "") -> None:
    """A section is a table: whatever else stood in its place would silently give way to one."""
    for name, field in model.model_fields.items():
        section = _find_section(field.annotation)
        if section is None or layer.get(name) is None:
            continue
        if not isinstance(layer[name], Mapping):
            some = next(iter(section.model_fields))
            raise ConfigError(
                f"{prefix}{name} is a table of settings, not {_format_value(layer[name])}.",
                f"[{prefix}{name}] in a line of its own, its settings below it: {some} = ...",
            )
        _check_tables(section, layer[name], f"{prefix}{name}.")


def resolve_paths(layer: dict[str, Any], folder: Path) -> None:
    """A path is beside what names it, wherever the run goes on later. Links are followed, as Python
    follows a script's: what a file imports is beside the file itself."""
    path = get_nested(layer, "runtime.env_file")
    if isinstance(path, str) and path:
        set_nested(layer, "runtime.env_file", str((folder / path).resolve()))


def validate_config(data: Mapping[str, Any]) -> RunConfig:
    """The config, or a sentence that names the field, its meaning and the value seen."""
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        first, *rest = error.errors(include_url=False)
        path = _find_setting(first["loc"])
        # A setting that may be several things has an error for each of them.
        path_errors = [first, *(other for other in rest if _find_setting(other["loc"]) == path)]
        reasons = dict.fromkeys(_format_reason({**entry}) for entry in path_errors)
        message = f" or {_SHOULD}".join(reasons).replace(f" or {_SHOULD}{_SHOULD}be ", " or ")
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"There is no setting {path!r}.", _suggest_settings(path)) from error
        seen_text = (
            "" if first["type"] == "value_error" else f", seen {_format_value(first['input'])}"
        )
        description = list_settings().get(path, "").rstrip(".")
        subject = f"{path} ({description}): " if description else f"{path}: " if path else ""
        sentence = f"{subject}{message}{seen_text}".replace(f": {_SHOULD}", " should ")
        raise ConfigError(f"{sentence}.", "rlflame config lists all") from error
    for name, value in config.learning.environment.kwargs.items():
        if not _is_json_value(value):
            raise ConfigError(
                f"The environment's argument {name} = {_shorten(value)} is not what a recipe can "
                "carry.",
                "texts, finite numbers of 64 bits, true and false, none, and lists and tables of "
                "them",
            )
    return config


def _shorten(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"


def _format_value(value: Any) -> str:
    return repr(value) if isinstance(value, str) else toml_io.format_value(value)


def _format_reason(error: Mapping[str, Any]) -> str:
    """What pydantic says, without what Python calls it."""
    if error["type"] in ("model_type", "dict_type"):
        return f"{_SHOULD}be a table"
    if error["type"] == "tuple_type":
        return f"{_SHOULD}be a list"
    return str(error["msg"]).removeprefix("Value error, ")


def _is_json_value(value: Any) -> bool:
    """Whether JSON, in which recipes are kept, can say it."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(map(_is_json_value, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json_value(inner) for name, inner in value.items())
    if isinstance(value, int):
        return abs(value) < 2**63  # a checkpoint with a larger one could not be read again
    return value is None or isinstance(value, str)


def parse_set(text: str) -> tuple[str, Any]:
    """`ppo.clip_range=0.1` -> the full path of the one setting that ends so, and its value."""
    key, equals, value_text = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} is not NAME=VALUE.", "--set ppo.clip_range=0.1")
    return find_full_key(key.strip()), toml_io.parse_value(value_text.strip())


def find_full_key(key: str) -> str:
    head, marker, tail = key.partition("environment.kwargs.")
    if marker and head in ("", "learning."):
        return f"learning.environment.kwargs.{tail}"
    matches = [path for path in list_settings() if path == key or path.endswith("." + key)]
    if len(matches) == 1:
        return matches[0]
    if key in matches:
        return key
    if matches:
        raise ConfigError(f"{key!r} could be any of {', '.join(matches)}.", "write one out")
    raise ConfigError(f"There is no setting {key!r}.", _suggest_settings(key))


def list_settings() -> dict[str, str]:
    """Every setting by its full path, with its explanation."""
    return {path: field.description or "" for path, field in walk_settings(RunConfig)}


def walk_settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, FieldInfo) of every setting that is not itself a section."""
    for name, field in model.model_fields.items():
        section = _find_section(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from walk_settings(section, f"{prefix}{name}.")


def _find_section(annotation: Any) -> type[BaseModel] | None:
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]
    non_null = [option for option in options if option is not NoneType]
    if len(non_null) == 1 and isinstance(non_null[0], type) and issubclass(non_null[0], BaseModel):
        return non_null[0]
    return None


def _find_setting(location: Sequence[int | str]) -> str:
    """The setting that pydantic complains of; its path may go on to a part, or to one choice."""
    path = ".".join(map(str, location))
    return next((name for name in list_settings() if path.startswith(f"{name}.")), path)


def _suggest_settings(key: str) -> str:
    """First those of the section that was typed, and of them what begins as what was typed."""
    section, _, last = key.rpartition(".")
    by_last: dict[str, list[str]] = {}
    for path in list_settings():
        by_last.setdefault(path.rpartition(".")[2], []).append(path)
    prefixed = [name for name in by_last if name.startswith(last)]
    close = difflib.get_close_matches(last, by_last, n=5, cutoff=0.5)
    paths = [path for name in dict.fromkeys([*prefixed, *close]) for path in by_last[name]]
    paths.sort(key=lambda path: not f".{path}".rpartition(".")[0].endswith(f".{section}"))
    suggestions = ", ".join(paths[:3])
    return f"did you mean {suggestions}?" if suggestions else "rlflame config lists all settings"


def merge_layers(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A layer of settings upon another. Whoever says how a run ends replaces what was said."""
    budgets = {"stop_at_steps", "stop_at_iterations"}
    overridden = {key for key in budgets if above.get(key) is not None}
    remaining = {key: value for key, value in below.items() if not (overridden and key in budgets)}
    return merge(remaining, above)
