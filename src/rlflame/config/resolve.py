"""Builds the config of a command from its options.

Precedence, highest first: options, --set, --config, the preset, the defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflame.config import module_trust, toml_io
from rlflame.config.algorithms import TRAITS
from rlflame.config.batch_flags import apply_batch_flags
from rlflame.config.flags import DEFAULT_ALGORITHM, RuntimeFlags, TrainFlags, read_rank
from rlflame.config.nested_dict import get_nested, merge, set_nested
from rlflame.config.preset_catalog import (
    ALIASES,
    choose_preset,
    read_named_preset,
    read_preset,
    resolve_env_id,
)
from rlflame.config.recipe import Recipe, RunConfig, make_defaults
from rlflame.config.runtime import RuntimeSettings
from rlflame.config.validation import (
    format_seen_value,
    parse_option_value,
    parse_set,
    validate_config,
)
from rlflame.config.wrapper_option import list_wrapper_names, parse_wrapper
from rlflame.errors import ConfigError, format_command, format_shell
from rlflame.rollout.envs.user_code import find_named_modules

_PACKAGES = "runtime.flame.extra_dependencies"
_ALGORITHM_KEYS = ("algorithm", "learning.algorithm")
#: Maps a field of the flags to the setting that takes its value unchanged.
_FLAG_SETTINGS = {
    "env": "learning.environment.id",
    "seed": "learning.seed",
    "device": "learning.device",
    "steps": "stop_at_steps",
    "iterations": "stop_at_iterations",
    "until_return": "evaluation.until_return",
    "workers": "runtime.workers",
    "video_every": "runtime.video_every_steps",
    "tensorboard": "runtime.tensorboard",
    "debug": "runtime.debug",
}


def format_config(config: Recipe) -> str:
    """Return a recipe or a config as TOML that `--config` reads back unchanged."""
    learning = config.learning
    base = make_defaults(learning.algorithm)
    preset = read_preset(choose_preset(learning.environment.id, learning.algorithm))
    overlay = preset.pop("continuous", {})
    for layer in (preset, overlay):
        base = merge(base, layer)
    return toml_io.to_toml(config, base)


def resolve(
    flags: TrainFlags, has_continuous_actions: Callable[[RunConfig], bool]
) -> tuple[RunConfig, str]:
    """Return the config for the options of `train`, and the name of its preset.

    The environment file that the options name is loaded. The `continuous` section of a preset
    applies only to environments with continuous actions.
    """
    file_layer = _read_config_file(flags.config) if flags.config else {}
    flag_layer = _make_flag_layer(flags)
    preset_layer = read_named_preset(flags.preset, merge_layers(file_layer, flag_layer))
    algorithm = _find_algorithm(flags, file_layer, preset_layer)
    typed_layer = merge_layers(_make_set_layer(flags.sets, algorithm), flag_layer)
    typed_layer = merge_layers(_make_device_layer(file_layer, typed_layer), typed_layer)
    _check_code(file_layer, typed_layer, flags.config)
    _allow_modules(flags, typed_layer)
    _drop_old_choices(file_layer, typed_layer)
    user_layer = merge_layers(file_layer, typed_layer)
    env_file = get_nested(user_layer, "runtime.env_file")
    if isinstance(env_file, str) and get_nested(user_layer, "learning.environment.id") is None:
        id = module_trust.find_file_environment(env_file)
        set_nested(user_layer, "learning.environment.id", id)
    environment = _choose_environment(user_layer, preset_layer)
    set_nested(user_layer, "learning.environment.id", environment)
    set_nested(user_layer, "learning.algorithm", algorithm)
    name = flags.preset or choose_preset(environment, algorithm)
    base_layer = read_preset(name)
    overlay = base_layer.pop("continuous", None)
    if get_nested(user_layer, "learning.device") == "cuda":
        # The shards of a preset are for several learners, but one GPU computes whole updates.
        set_nested(base_layer, "learning.gradient_shards", 1)
    config = _validate_layers(base_layer, user_layer)
    settings = config.learning.environment
    module_trust.check_modules(settings.id, settings.kwargs, settings.wrapper_names)
    if overlay is not None and has_continuous_actions(config):
        config = _validate_layers(base_layer, overlay, user_layer)
    _check_until_return(config)
    return apply_batch_flags(config, flags), name


def resolve_runtime(
    flags: RuntimeFlags,
    run_layer: Mapping[str, Any] | None = None,
    file: Path | None = None,
    *,
    reason: str = "and an evaluation uses the recipe of its policy.",
    hint: str = "set only settings that begin with runtime.",
) -> RuntimeSettings:
    """Return the runtime settings of a saved config, overridden by the options.

    Only an environment file that the options name is loaded.
    """
    for key, _ in map(parse_set, flags.sets or ()):
        if not key.startswith("runtime."):
            raise ConfigError(f"{key} belongs to the recipe, {reason}", hint)
    typed_layer = merge(_make_set_layer(flags.sets), _make_flag_layer(flags))
    _allow_modules(flags, typed_layer)
    _check_packages(run_layer or {}, typed_layer, file)
    runtime_layer = get_nested(run_layer or {}, "runtime")
    runtime_layer = dict(runtime_layer) if isinstance(runtime_layer, Mapping) else {}
    for name in ("progress", "debug", "env_file"):  # each command sets these itself
        runtime_layer.pop(name, None)
    layers = {"stop_at_steps": 1, "runtime": runtime_layer}
    try:
        validate_config(layers)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", error.hint) from error
    runtime = validate_config(merge(layers, typed_layer)).runtime
    if runtime.env_file is not None:
        expected = get_nested(run_layer or {}, "learning.environment.file_digest")
        module_trust.load_env_file(runtime.env_file, expected and str(expected))
    return runtime


def _read_config_file(path: Path) -> dict[str, Any]:
    layer = toml_io.read_file(path)
    if "job" in layer:
        raise ConfigError(
            f"{path} is the config of a sweep over several seeds, not of a single run.",
            f"{format_command('resume', path.parent)} continues the sweep",
        )
    _resolve_env_file(layer, path.parent)
    return layer


def _drop_old_choices(file_layer: dict[str, Any], typed_layer: Mapping[str, Any]) -> None:
    """Remove what a run found out about its environment, if options change the environment."""
    settings = get_nested(file_layer, "learning.environment")
    changes = get_nested(typed_layer, "learning.environment")
    names = {name for name, value in (changes or {}).items() if value} - {"episodes"}
    if isinstance(settings, dict) and (names or get_nested(typed_layer, "runtime.env_file")):
        for name in ("episodes", "ignore"):
            settings.pop(name, None)


def _make_set_layer(sets: Sequence[str] | None, algorithm: str | None = None) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for text in sets or ():
        set_nested(layer, *parse_set(text, algorithm))
    _resolve_env_file(layer, Path.cwd())
    return layer


def _make_flag_layer(flags: RuntimeFlags) -> dict[str, Any]:
    displays = {"json": flags.json_lines, "quiet": flags.quiet, "plain": flags.plain}
    names = [name for name, is_set in displays.items() if is_set]
    if len(names) > 1:
        options = " and ".join(f"--{name}" for name in names)
        raise ConfigError(f"{options} cannot be combined.", "remove all but one")
    if flags.local and flags.fleet not in (None, "local"):
        raise ConfigError(f"--local and --fleet {flags.fleet} cannot be combined.", "remove one")
    rank = read_rank()
    learners = flags.learners or (str(rank.size) if rank else None)
    settings = {setting: getattr(flags, name, None) for name, setting in _FLAG_SETTINGS.items()}
    settings |= {
        "runtime.learners": int(learners) if learners and learners.isdigit() else learners,
        "runtime.fleet": flags.fleet or ("local" if flags.local else None),
        "runtime.env_file": str(flags.env_file.resolve()) if flags.env_file else None,
        "runtime.progress": names[0] if names else None,
    }
    if isinstance(flags, TrainFlags):
        settings |= {
            "learning.algorithm": flags.algo.lower() if flags.algo else None,
            "learning.environment.kwargs": dict(map(_parse_env_argument, flags.env_kwargs or ())),
            "learning.environment.wrappers": [parse_wrapper(text) for text in flags.wrap or ()],
            "runtime.out": _format_out(flags.out),
        }
    layer: dict[str, Any] = {}
    for setting, value in settings.items():
        if value is not None and value is not False and value not in ({}, []):
            set_nested(layer, setting, value)
    return layer


def _make_device_layer(
    file_layer: Mapping[str, Any], typed_layer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that follow from a device that the options name."""
    device = get_nested(typed_layer, "learning.device")
    if device == "cuda":
        return {"learning": {"provider": "torch"}}
    if device == "cpu" and get_nested(file_layer, "learning.device") == "cuda":
        return {"learning": {"provider": "numpy", "precision": "float32"}}
    return {}


def _parse_env_argument(text: str) -> tuple[str, Any]:
    key, equals, value_text = text.partition("=")
    if not equals or not key.strip().isidentifier():
        raise ConfigError(f"--env-kwargs {text!r} is not KEY=VALUE.", "--env-kwargs gravity=5")
    return key.strip(), parse_option_value("--env-kwargs", text, value_text)


def _format_out(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--out {str(path)!r} is not UTF-8.", "use another name") from error
    if path.resolve() == Path.cwd():
        raise ConfigError(f"--out {str(path)!r} is the current folder.", "--out runs/mine")
    return str(path)


def _resolve_env_file(layer: dict[str, Any], folder: Path) -> None:
    """Make the path of the environment file, which is relative to `folder`, absolute."""
    # Resolve links, because a script imports modules from the folder of the real file.
    path = get_nested(layer, "runtime.env_file")
    if isinstance(path, str) and path:
        set_nested(layer, "runtime.env_file", str((folder / path).resolve()))


def _check_code(
    file_layer: Mapping[str, Any], typed_layer: Mapping[str, Any], file: Path | None
) -> None:
    """Raise ConfigError if a config file names code that no option names."""
    env_file = get_nested(file_layer, "runtime.env_file")
    if isinstance(env_file, str) and get_nested(typed_layer, "runtime.env_file") is None:
        raise ConfigError(
            f"{file} names the environment file {env_file}, and loading it runs its code.",
            f"if you trust it, add {format_shell('--env-file', env_file)}",
        )
    _check_packages(file_layer, typed_layer, file)


def _check_packages(
    file_layer: Mapping[str, Any], typed_layer: Mapping[str, Any], file: Path | None
) -> None:
    """Reject packages that only a file names, because installing one runs its code."""
    packages = get_nested(file_layer, _PACKAGES)
    if packages and get_nested(typed_layer, _PACKAGES) is None:
        text = toml_io.format_value(packages)
        raise ConfigError(
            f"{file} asks executors to install {text}, and installing a package runs its code.",
            f"if you trust them, add {format_shell('--set', f'{_PACKAGES}={text}')}, "
            f"or, to run without them, {format_shell('--set', f'{_PACKAGES}=[]')}",
        )


def _allow_modules(flags: RuntimeFlags, typed_layer: Mapping[str, Any]) -> None:
    """Allow the modules that the options name, but not those that only a file names."""
    id = get_nested(typed_layer, "learning.environment.id")
    kwargs = get_nested(typed_layer, "learning.environment.kwargs")
    modules = find_named_modules(
        id if isinstance(id, str) else "",
        kwargs if isinstance(kwargs, Mapping) else {},
        list_wrapper_names(get_nested(typed_layer, "learning.environment.wrappers")),
    )
    module_trust.allow_modules([*(flags.allow_modules or ()), *modules])


def _choose_environment(user_layer: Mapping[str, Any], preset_layer: Mapping[str, Any]) -> str:
    name = "learning.environment.id"
    id = get_nested(merge(preset_layer, user_layer), name)
    id = ALIASES["cartpole"].id if id is None else id
    if not isinstance(id, str) or not id:
        raise ConfigError(f"{format_seen_value(id)} is not an environment id.", "--env hopper")
    return resolve_env_id(id)


def _find_algorithm(
    flags: TrainFlags, file_layer: Mapping[str, Any], preset_layer: Mapping[str, Any]
) -> str:
    """Return the algorithm, which decides what the short names of settings mean."""
    sets = [text.partition("=") for text in flags.sets or ()]
    names = [value.strip() for key, _, value in sets if key.strip() in _ALGORITHM_KEYS]
    algorithm = (
        flags.algo
        or next(reversed(names), None)
        or get_nested(file_layer, "learning.algorithm")
        or get_nested(preset_layer, "learning.algorithm")
        or DEFAULT_ALGORITHM
    )
    name = str(algorithm).lower()
    if name not in TRAITS:
        raise ConfigError(f"There is no algorithm {algorithm!r}.", f"--algo {' or '.join(TRAITS)}")
    return name


def _validate_layers(*layers: Mapping[str, Any]) -> RunConfig:
    """Merge and validate layers; later layers have priority.

    The resulting recipe contains the digest of --env-file.
    """
    config = validate_config(functools.reduce(merge_layers, layers))
    recipe = module_trust.pin_env_file(config.recipe, config.runtime.env_file)
    return config.model_copy(update={"learning": recipe.learning})


def _check_until_return(config: RunConfig) -> None:
    """Reject a target return unless training includes evaluations of several episodes."""
    evaluation, rollout = config.evaluation, config.learning.rollout
    every_steps, episodes = evaluation.every_steps, evaluation.episodes
    if evaluation.until_return is None:
        return
    if every_steps is None or episodes == 1:
        raise ConfigError(
            "--until-return needs evaluations of several episodes during training, but "
            f"every_steps is {toml_io.format_value(every_steps)} and episodes is {episodes}.",
            "--set evaluation.every_steps=50000 --set evaluation.episodes=8",
        )
    # An iteration is never cut short, so a run may take more steps than its budget.
    unit, limits = rollout.steps_per_iteration, []
    if config.stop_at_steps is not None:
        limits.append(-(-config.stop_at_steps // unit) * unit)
    if config.stop_at_iterations is not None:
        limits.append(config.stop_at_iterations * unit)
    if every_steps > min(limits):
        raise ConfigError(
            "--until-return needs evaluations during training, but the run ends after "
            f"{min(limits):,} steps, and every_steps is {every_steps:,}.",
            f"--set evaluation.every_steps={max(1, min(limits) // 10)}",
        )


def merge_layers(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `overrides` into a copy of `base`.

    A budget in `overrides` replaces every budget in `base`.
    """
    budgets = ("stop_at_steps", "stop_at_iterations")
    if any(overrides.get(key) is not None for key in budgets):
        base = {key: value for key, value in base.items() if key not in budgets}
    return merge(base, overrides)
