"""Parses the option `--wrap MODULE:CLASS,KEY=VALUE,...`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflame.config.validation import parse_option_value
from rlflame.errors import ConfigError

_EXAMPLE = "--wrap gymnasium.wrappers:RescaleAction,min_action=-1,max_action=1"
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def parse_wrapper(text: str) -> dict[str, Any]:
    """Return the settings of a wrapper."""
    name, *arguments = _split_parts(text)
    pairs = [argument.partition("=") for argument in arguments]
    is_valid = all(equals and key.strip().isidentifier() for key, equals, _ in pairs)
    module, _, target = name.partition(":")
    if not module.strip() or not target.strip() or not is_valid:
        raise ConfigError(f"--wrap {text!r} is not MODULE:CLASS,KEY=VALUE,...", _EXAMPLE)
    kwargs = {key.strip(): parse_option_value("--wrap", text, value) for key, _, value in pairs}
    return {"name": name.strip(), "kwargs": kwargs}


def _split_parts(text: str) -> list[str]:
    """Split at commas that are not in quotes or brackets."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += _BRACKETS.get(letter, 0)
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def list_wrapper_names(layer: Any) -> list[str]:
    """Return the names of the wrappers in a layer of settings, which may not be valid."""
    items = layer if isinstance(layer, list | tuple) else []
    names = [item.get("name") for item in items if isinstance(item, Mapping)]
    return [name for name in names if isinstance(name, str)]
