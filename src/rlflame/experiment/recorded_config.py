"""Reads the saved config of a run or sweep, and resolves its runtime settings.

This module does not import numpy, because the saved number of threads must be known before numpy is
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflame.config import nested_dict, toml_io
from rlflame.config.flags import RuntimeFlags
from rlflame.config.resolve import resolve_runtime
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, format_command, format_shell
from rlflame.storage.sweep_folder import RESTORE_HINT, SWEEP_FILE, is_sweep, list_seed_runs


def read_recorded_config(target: Path) -> dict[str, Any]:
    """Return the config of a run, checkpoint or sweep, or {} if it is missing."""
    file = _find_config(target)
    if not file.is_file() and list_seed_runs(file.parent):
        raise ConfigError(f"{file.parent} has seed folders but no {SWEEP_FILE}.", RESTORE_HINT)
    # Checkpoints hold the recipe of a run, so its config may be removed. A sweep needs its file.
    is_run = file.name != SWEEP_FILE
    hint = f"repair it or remove it: {format_shell('rm', file)}" if is_run else RESTORE_HINT
    try:
        return toml_io.read_file(file) if file.is_file() else {}
    except ConfigError as error:
        raise ConfigError(error.message, hint) from error


def read_recorded_threads(config_layer: Mapping[str, Any]) -> int:
    threads = nested_dict.get_nested(config_layer, "learning.threads")
    return threads if isinstance(threads, int) and threads > 0 else 1


def resolve_resumed_runtime(
    target: Path, config_layer: Mapping[str, Any], flags: RuntimeFlags
) -> RuntimeSettings:
    """Return the saved runtime settings, overridden by options such as --set."""
    file = _find_config(target)
    config = file.with_name("config.toml")
    policy = config.with_name("latest.safetensors") if target.is_dir() else target
    sets = [word for text in flags.sets or () for word in ("--set", text)]
    command = format_command("train", "--config", config, "--init-from", policy, *sets)
    return resolve_runtime(
        flags,
        config_layer,
        file,
        reason="which resume cannot change.",
        hint=f"change the end with --steps N, or start a new run from this policy: {command}",
    )


def _find_config(target: Path) -> Path:
    """Return the path of the config of a run, a sweep or a checkpoint's run."""
    folder = target if target.is_dir() else target.absolute().parent
    if folder.name == "checkpoints":
        folder = folder.parent
    return folder / (SWEEP_FILE if is_sweep(folder) else "config.toml")
