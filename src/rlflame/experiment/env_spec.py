"""An environment looked at by making it; what cannot be learned in is refused by name.

Must not know: recipes, policies.
"""

from __future__ import annotations

import difflib

import gymnasium

from rlflame.config.module_trust import check_modules
from rlflame.config.recipe import EnvironmentSettings
from rlflame.config.resolve import ALIASES
from rlflame.config.toml_io import format_value
from rlflame.errors import ConfigError, UnknownEnvironmentError
from rlflame.rendering import gl_backend
from rlflame.rollout.envs.make import UnsupportedSpace, read_env_spec
from rlflame.rollout.spec import EnvSpec


def inspect_env(settings: EnvironmentSettings) -> EnvSpec:
    """Its shapes, or an error that says what is wrong with it."""
    name = settings.id
    modules = check_modules(name, settings.kwargs)
    try:
        return read_env_spec(name, dict(settings.kwargs), settings.max_episode_steps, modules)
    except UnsupportedSpace as error:
        raise ConfigError(
            f"{name} has {error}, which rlflame does not learn in.",
            "it takes Box observations (no images), and Discrete or Box actions",
        ) from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name} could not be imported: {_get_first_line(error)}.",
            "install what is missing; a module in the current folder is searched for only if the "
            "command names it: --allow-module MODULE",
        ) from error
    except gymnasium.error.DependencyNotInstalled as error:
        cause = error.__cause__
        if cause is not None and gl_backend.is_gl_failure(error):
            raise gl_backend.make_gl_failure_error(_get_first_line(cause)) from error
        if isinstance(cause, ImportError) and not isinstance(cause, ModuleNotFoundError):
            raise ConfigError(
                f"{name} needs a package that cannot be loaded: {_get_first_line(cause)}.",
                "install what that package needs, or the package anew",
            ) from error
        raise ConfigError(
            f"{name} needs a package that is missing: {_get_first_line(error)}.",
            "install it into the environment that rlflame runs in",
        ) from error
    except gymnasium.error.UnregisteredEnv as error:
        raise UnknownEnvironmentError(
            f"There is no environment {name!r}.", _suggest_ids(name)
        ) from error
    except gymnasium.error.Error as error:
        raise ConfigError(
            f"{name} cannot be made: {_get_first_line(error)}.", "rlflame envs"
        ) from error
    except (Exception, SystemExit) as error:
        if gl_backend.is_gl_failure(error):
            raise gl_backend.make_gl_failure_error(_get_first_line(error)) from error
        kwargs_text = f" with {format_value(settings.kwargs)}" if settings.kwargs else ""
        hint = "check --env-kwargs" if kwargs_text else _suggest_ids(name)
        raise ConfigError(
            f"{name} cannot be made{kwargs_text}: {_get_first_line(error)}.", hint
        ) from error


def _suggest_ids(name: str) -> str:
    """The registered ids that a misspelt one may have meant."""
    ids = {
        key.lower(): key
        for key, spec in gymnasium.registry.items()
        # What has moved elsewhere has a function of Gymnasium's there, which says so.
        if key != name and not getattr(spec.entry_point, "__name__", "").startswith("_raise")
    } | {key: key for key in ALIASES}
    close = difflib.get_close_matches(name.lower(), ids, n=3, cutoff=0.5)
    if not close:
        return "rlflame envs lists them"
    return f"did you mean {', '.join(ids[key] for key in close)}? rlflame envs lists them"


def _get_first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
