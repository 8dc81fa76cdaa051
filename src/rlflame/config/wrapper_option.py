"""Parses the option `--wrap MODULE:CLASS,KEY=VALUE,...`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlflame.config import toml_io
from rlflame.errors import ConfigError

#: A part of the option; commas in quotes and brackets do not separate parts.
_PART = re.compile(r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,])+""")
_EXAMPLE = "--wrap gymnasium.wrappers:RescaleAction,min_action=-1,max_action=1"


def parse_wrapper(text: str) -> dict[str, Any]:
    """Return the settings of a wrapper."""
    name, *arguments = _PART.findall(text) or [""]
    pairs = [argument.partition("=") for argument in arguments]
    is_valid = all(equals and key.strip().isidentifier() for key, equals, _ in pairs)
    if ":" not in name or not is_valid:
        raise ConfigError(f"--wrap {text!r} is not MODULE:CLASS,KEY=VALUE,...", _EXAMPLE)
    kwargs = {key.strip(): toml_io.parse_value(value.strip()) for key, _, value in pairs}
    return {"name": name.strip(), "kwargs": kwargs}


def list_wrapper_names(layer: Any) -> list[str]:
    """Return the names of the wrappers in a layer of settings, which may not be valid."""
    items = layer if isinstance(layer, list | tuple) else []
    names = [item.get("name") for item in items if isinstance(item, Mapping)]
    return [name for name in names if isinstance(name, str)]
