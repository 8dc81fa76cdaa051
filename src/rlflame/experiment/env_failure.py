"""Explains why an environment cannot be created, with the option or package that helps."""

from __future__ import annotations

import re
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rlflame.config.recipe import EnvironmentSettings
from rlflame.config.toml_io import format_value
from rlflame.errors import ConfigError, RlflameError, format_shell


class EnvPackage(NamedTuple):
    """A package with environments, the module that registers them, and their IDs."""

    package: str
    module: str
    ids: str
    #: The options that make an environment, if the module does not register the IDs.
    options: str = ""


_HIGHWAY = (
    "highway|merge|roundabout|parking|intersection|racetrack|lane-keeping|two-way|u-turn|exit"
)
#: Well-known packages whose environments exist only after their module was imported.
_PACKAGES = (
    EnvPackage("ale-py", "ale_py", r"ALE/.+"),
    EnvPackage("minigrid", "minigrid", r"(MiniGrid|BabyAI)-.+"),
    EnvPackage("highway-env", "highway_env", rf"({_HIGHWAY})(-.+)?-v\d+"),
    EnvPackage(
        "gymnasium-robotics",
        "gymnasium_robotics",
        r"(Fetch(Reach|Push|Slide|PickAndPlace)|Hand(Reach|Manipulate)|AdroitHand|"
        r"(Ant|Point)Maze|FrankaKitchen).*",
    ),
    EnvPackage("panda-gym", "panda_gym", r"Panda(Reach|Push|Slide|PickAndPlace|Stack|Flip).*"),
    EnvPackage("pybullet_envs_gymnasium", "pybullet_envs_gymnasium", r".+BulletEnv-v\d+"),
    EnvPackage(
        "MinAtar",
        "minatar",
        r"MinAtar/.+",
        "--env minatar.gym:BaseEnv --env-kwargs game=breakout",
    ),
    EnvPackage("shimmy[dm-control]", "shimmy", r"dm_control/.+"),
)
#: Frames of these packages only pass an error on.
_PASSING_PACKAGES = ("/gymnasium/", "/rlflame/", "/site-packages/", "<frozen ")


def explain_env_failure(settings: EnvironmentSettings, error: BaseException) -> RlflameError:
    """Return the error for an environment that cannot be created or used."""
    import gymnasium

    from rlflame.rollout.envs.make import is_registered
    from rlflame.rollout.envs.spaces import UnknownPart, UnsupportedSpace

    name, cause = settings.id, _get_first_line(error)
    if isinstance(error, UnsupportedSpace):
        remark = "" if isinstance(error, UnknownPart) else " rlflame cannot use them."
        return ConfigError(f"{name} has {error}.{remark}", error.hint)
    if isinstance(error, gymnasium.error.UnregisteredEnv) and not is_registered(name):
        return _explain_unknown_id(name, str(error))
    if isinstance(error, ModuleNotFoundError | gymnasium.error.DependencyNotInstalled):
        if error.__cause__ is not None:
            cause = f"{cause}: {_get_first_line(error.__cause__)}"
        return ConfigError(
            f"{name} needs a package that is missing or cannot be imported: {cause}.",
            "install it where rlflame is installed; a module in the current folder needs "
            "--allow-module MODULE",
        )
    if isinstance(error, gymnasium.error.DeprecatedEnv):
        return ConfigError(f"{name}: {cause}.", _format_suggestion(name, str(error)))
    kwargs_text = f" with {format_value(settings.kwargs)}" if settings.kwargs else ""
    place = _find_raising_line(error)
    hint = f"correct {place}" if place else "check that gymnasium.make works without rlflame"
    options = ["--env-kwargs"] * bool(kwargs_text) + ["--wrap"] * bool(settings.wrappers)
    if settings.wrappers:
        kwargs_text += f" with the wrappers {', '.join(settings.wrapper_names)}"
    if options:
        check = f"check {' and '.join(options)}"
        hint = f"{check}, or {hint}" if place else check
    kind = f"{type(error).__name__}: " if place and str(error).strip() else ""
    return ConfigError(f"{name} cannot be created{kwargs_text}: {kind}{cause}.", hint)


def _explain_unknown_id(id: str, text: str) -> ConfigError:
    """Return the error for an ID that no imported module registers."""
    package = next((item for item in _PACKAGES if re.fullmatch(item.ids, id)), None)
    if package is not None:
        spelling = package.options or format_shell("--env", f"{package.module}:{id}")
        install = format_shell("pip", "install", package.package)
        is_installed = find_spec(package.module) is not None
        return ConfigError(
            f"The environment {id} is in the package {package.package}, which must be imported.",
            spelling if is_installed else f"{install}, then {spelling}",
        )
    module, _, name = id.rpartition(":")
    if module:
        from rlflame.rollout.envs.make import list_constructors

        names = list_constructors(module)
        choices = f"; {module} has {', '.join(names)}" if names else ""
        return ConfigError(
            f"The module {module} neither registers an environment {name!r} nor defines a function "
            f"or class of that name{choices}.",
            f"register it in {module}, or name a function or class: --env {module}:"
            f"{names[0].partition(':')[2] if names else 'make_env'}",
        )
    suggestion = _format_suggestion(id, text)
    choices = "rlflame envs lists some ids"
    remark = text.partition(". ")[2]
    if versions := re.findall(r"`(v\d+)`", remark):
        *others, last = versions
        list_text = f"versions {', '.join(others)} and {last}" if others else f"version {last}"
        remark = f"{id.rpartition('-')[0]} has the {list_text}."
    return ConfigError(
        f"There is no environment {id!r}. {remark}".rstrip(),
        f"{f'{suggestion}; {choices}' if suggestion else choices}; yours needs --env-file FILE.py, "
        "which must register it",
    )


def _format_suggestion(id: str, text: str) -> str:
    """Return the option for the ID that Gymnasium's message suggests last, if any."""
    names = re.findall(r"`([^`]+)`", text)
    if not names or names[-1] in (id, re.sub(r"-v\d+$", "", id)):  # it only repeats the ID
        return ""
    version = re.fullmatch(r"v\d+", names[-1])
    return format_shell("--env", f"{id.rpartition('-')[0]}-{names[-1]}" if version else names[-1])


def _get_first_line(error: BaseException) -> str:
    text = str(error).strip()
    if not text:
        return f"{type(error).__name__} in {_find_raising_line(error, ('<frozen ',))}"
    # Gymnasium appends the arguments, which the message already contains.
    text = text.partition(" was raised from the environment creator for ")[0]
    return text.splitlines()[0].rstrip(".")


def _find_raising_line(error: BaseException, passing: tuple[str, ...] = _PASSING_PACKAGES) -> str:
    """Return the last line outside some packages that raised an error, or ""."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [f for f in frames if not any(text in f.filename for text in passing)]
    return f"line {frames[-1].lineno} of {Path(frames[-1].filename)}" if frames else ""
