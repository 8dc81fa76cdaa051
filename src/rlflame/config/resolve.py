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
from rlflame.config.nested import get, merge, put
from rlflame.config.recipe import EvaluationSettings, LearningSettings, RunConfig
from rlflame.errors import ConfigError, shell, typed
from rlflame.rollout.envs.module_access import named_modules

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
_BY_ID = {alias.id: name for name, alias in ALIASES.items()}


def environment_id(name: str) -> str:
    """The Gymnasium id that a user's word stands for."""
    alias = ALIASES.get(name.lower())
    return alias.id if alias else name


def short_name(id: str) -> str:
    """The alias of an id, or the id as a word that can name a folder."""
    return _BY_ID.get(id) or "".join(c if c.isalnum() or c in "-_." else "-" for c in id).lower()


def preset_names() -> list[str]:
    return sorted(f.name[:-5] for f in _PRESETS.iterdir() if f.name.endswith(".toml"))


def preset_for(id: str, algorithm: str) -> str:
    """The environment's own preset, or its family's, or the default one of the algorithm."""
    known = preset_names()
    words = (_BY_ID[id], ALIASES[_BY_ID[id]].family) if id in _BY_ID else ()
    for word in words:
        if f"{word}-{algorithm}" in known:
            return f"{word}-{algorithm}"
    return f"default-{algorithm}"


def read_preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        close = difflib.get_close_matches(name, preset_names(), n=3)
        raise ConfigError(
            f"There is no preset {name!r}.", f"presets: {', '.join(close or preset_names())}"
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
    flagged: dict[str, Any] = {}
    for key, value in (flags or {}).items():
        put(flagged, key, value)
    if environment:
        put(flagged, "learning.environment.id", environment)
    if algorithm:
        put(flagged, "learning.algorithm", algorithm)
    written: dict[str, Any] = {}
    for text in sets:
        put(written, *parse_set(text))
    from_file = toml_io.read_file(config_file) if config_file else {}
    if config_file and "job" in from_file:
        raise ConfigError(
            f"{config_file} is of a job of several seeds, and not the config of a run.",
            f"{typed('resume', config_file.parent)} takes it up",
        )
    _check_tables(RunConfig, from_file)
    locate(written, Path.cwd())
    if config_file:
        locate(from_file, config_file.parent)
    above = over(over(from_file, written), flagged)
    asked = get(from_file, "runtime.env_file")
    if isinstance(asked, str) and get(over(written, flagged), "runtime.env_file") is None:
        raise ConfigError(
            f"{config_file} names the environment file {asked}, and loading it runs its code.",
            f"if you trust it, add {shell('--env-file', asked)}",
        )
    check_packages(from_file, over(written, flagged), f"{config_file}")
    for layer in (written, flagged):  # what the user typed, and not what a file says
        kwargs = get(layer, "learning.environment.kwargs")
        id = get(layer, "learning.environment.id")
        allow_modules(
            named_modules(
                id if isinstance(id, str) else "", kwargs if isinstance(kwargs, Mapping) else {}
            )
        )

    chosen = read_preset(preset) if preset else {}
    method = get(above, "learning.algorithm") or get(chosen, "learning.algorithm") or "ppo"
    id = get(above, "learning.environment.id")
    if id is None:
        id = ALIASES["cartpole"].id
    if not isinstance(id, str) or not id:
        raise ConfigError(f"{_shown(id)} is no environment's id.", "--env hopper")
    id = environment_id(id)
    if method not in ALGORITHMS:
        known = " or ".join(ALGORITHMS)
        raise ConfigError(f"There is no algorithm {method!r}.", f"--algo {known}")
    put(above, "learning.environment.id", id)
    put(above, "learning.algorithm", method)
    for named, below in ((f"the preset {preset}", chosen), (f"{config_file}", from_file)):
        theirs = get(below, "learning.algorithm")
        if theirs not in (None, method):
            raise ConfigError(
                f"The algorithm is to be {method}, and {named} is for {theirs}.",
                f"leave one of them out, or use --preset {preset_for(id, str(method))}",
            )
    name = preset or preset_for(id, method)
    layers = read_preset(name)
    overlay = layers.pop("continuous", None)
    config = validated(over(layers, above))
    check_modules(config.learning.environment.id, config.learning.environment.kwargs)
    if overlay is not None and continuous(config):
        config = validated(over(over(layers, overlay), above))
    _check_until_return(config.evaluation)
    return config, name


def check_packages(recorded: Mapping[str, Any], typed_in: Mapping[str, Any], file: str) -> None:
    """Refuse packages that only a file asks executors to install: installing one runs its code."""
    asked = get(recorded, PACKAGES)
    if asked and get(typed_in, PACKAGES) is None:
        raise ConfigError(
            f"{file} asks executors to install {toml_io.written(asked)}, and installing a package "
            "runs its code.",
            f"if you trust them, add {shell('--set', f'{PACKAGES}={toml_io.written(asked)}')}, "
            f"or without them {shell('--set', f'{PACKAGES}=[]')}",
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
        section = _section(field.annotation)
        if section is None or layer.get(name) is None:
            continue
        if not isinstance(layer[name], Mapping):
            some = next(iter(section.model_fields))
            raise ConfigError(
                f"{prefix}{name} is a table of settings, not {_shown(layer[name])}.",
                f"[{prefix}{name}] in a line of its own, its settings below it: {some} = ...",
            )
        _check_tables(section, layer[name], f"{prefix}{name}.")


def locate(layer: dict[str, Any], folder: Path) -> None:
    """A path is beside what names it, wherever the run goes on later. Links are followed, as Python
    follows a script's: what a file imports is beside the file itself."""
    path = get(layer, "runtime.env_file")
    if isinstance(path, str) and path:
        put(layer, "runtime.env_file", str((folder / path).resolve()))


def validated(data: Mapping[str, Any]) -> RunConfig:
    """The config, or a sentence that names the field, its meaning and the value seen."""
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        path = _setting(first["loc"])
        # A setting that may be several things has an error for each of them.
        alike = [first, *(other for other in others if _setting(other["loc"]) == path)]
        said = dict.fromkeys(_said({**each}) for each in alike)
        message = f" or {_SHOULD}".join(said).replace(f" or {_SHOULD}{_SHOULD}be ", " or ")
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"There is no setting {path!r}.", _did_you_mean(path)) from error
        seen = "" if first["type"] == "value_error" else f", seen {_shown(first['input'])}"
        about = leaves().get(path, "").rstrip(".")
        subject = f"{path} ({about}): " if about else f"{path}: " if path else ""
        sentence = f"{subject}{message}{seen}".replace(f": {_SHOULD}", " should ")
        raise ConfigError(f"{sentence}.", "rlflame config lists all") from error
    for name, value in config.learning.environment.kwargs.items():
        if not _plain(value):
            raise ConfigError(
                f"The environment's argument {name} = {_short(value)} is not what a recipe can "
                "carry.",
                "texts, finite numbers of 64 bits, true and false, none, and lists and tables of "
                "them",
            )
    return config


def _short(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else toml_io.written(value)


def _said(error: Mapping[str, Any]) -> str:
    """What pydantic says, without what Python calls it."""
    if error["type"] in ("model_type", "dict_type"):
        return f"{_SHOULD}be a table"
    if error["type"] == "tuple_type":
        return f"{_SHOULD}be a list"
    return str(error["msg"]).removeprefix("Value error, ")


def _plain(value: Any) -> bool:
    """Whether JSON, in which recipes are kept, can say it."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _plain(inner) for name, inner in value.items())
    if isinstance(value, int):
        return abs(value) < 2**63  # a checkpoint with a larger one could not be read again
    return value is None or isinstance(value, str)


def parse_set(text: str) -> tuple[str, Any]:
    """`ppo.clip_range=0.1` -> the full path of the one setting that ends so, and its value."""
    key, equals, written = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} is not NAME=VALUE.", "--set ppo.clip_range=0.1")
    return full_key(key.strip()), toml_io.parse_value(written.strip())


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


def _setting(place: Sequence[int | str]) -> str:
    """The setting that pydantic complains of; its path may go on to a part, or to one choice."""
    path = ".".join(map(str, place))
    return next((name for name in leaves() if path.startswith(f"{name}.")), path)


def _did_you_mean(key: str) -> str:
    """First those of the section that was typed, and of them what begins as what was typed."""
    section, _, last = key.rpartition(".")
    by_last: dict[str, list[str]] = {}
    for path in leaves():
        by_last.setdefault(path.rpartition(".")[2], []).append(path)
    begun = [name for name in by_last if name.startswith(last)]
    close = difflib.get_close_matches(last, by_last, n=5, cutoff=0.5)
    found = [path for name in dict.fromkeys([*begun, *close]) for path in by_last[name]]
    found.sort(key=lambda path: not f".{path}".rpartition(".")[0].endswith(f".{section}"))
    known = ", ".join(found[:3])
    return f"did you mean {known}?" if known else "rlflame config lists all settings"


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A layer of settings upon another. Whoever says how a run ends replaces what was said."""
    budgets = {"stop_at_steps", "stop_at_iterations"}
    spoken = {key for key in budgets if above.get(key) is not None}
    kept = {key: value for key, value in below.items() if not (spoken and key in budgets)}
    return merge(kept, above)
