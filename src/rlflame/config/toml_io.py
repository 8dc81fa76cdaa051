"""Settings as TOML, both ways: whatever is written reads back as the same values.

TOML has no null, so the word "none" stands for an absent value; a text that is really that word
carries a backslash before it. Must not know: which settings there are.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlflame.config import regular_file
from rlflame.errors import ConfigError
from rlflame.text import escape_unicode

NONE = "none"
_ESCAPED = re.compile(r"\\+none")
_NEEDS_ESCAPE = re.compile(r"\\*none")
#: As tomllib understands a key without quotes.
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_file(path: Path) -> dict[str, Any]:
    try:
        return parse(regular_file.read_text(path, regular_file.SETTINGS_BYTES))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", "check --config") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.", "check --config") from error


def parse(text: str) -> dict[str, Any]:
    result: dict[str, Any] = _present(tomllib.loads(text))
    return result


def parse_value(text: str) -> Any:
    """A TOML value, or else the text itself, so that plain words need no quotes."""
    try:
        found = tomllib.loads(f"x = {text}")
    except (ValueError, RecursionError):
        return _present(text)
    value = found["x"] if len(found) == 1 else text
    # A date is nothing that a setting could be; whoever types one means the text.
    plain = isinstance(value, str | bool | int | float | list | dict)
    return _present(value if plain else text)


def to_toml(config: BaseModel) -> str:
    """A config as the TOML that reads back as the same config."""
    lines: list[str] = []
    _write_table(config.model_dump(mode="json"), "", lines)
    return "\n".join(lines).strip() + "\n"


def _present(value: Any) -> Any:
    """The value with the word for an absent one turned into one."""
    if isinstance(value, Mapping):
        return {key: _present(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_present(inner) for inner in value]
    if value == NONE:
        return None
    if isinstance(value, str) and _ESCAPED.fullmatch(value):
        return value[1:]
    return value


def _write_table(table: Mapping[str, Any], path: str, lines: list[str]) -> None:
    inner = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    plain = {name: value for name, value in table.items() if name not in inner}
    if path and (plain or not inner):
        lines += ["", f"[{path}]"]
    # The section of an algorithm that is not used is absent, not a setting with the value none.
    absent_sections = {"ppo", "reinforce", "sac"} if path == "learning" else set()
    for name, value in plain.items():
        if value is None and name in absent_sections:
            continue
        lines.append(f"{key(name)} = {written(value)}")
    for name, value in inner.items():
        _write_table(value, f"{path}.{key(name)}" if path else key(name), lines)


def key(name: str) -> str:
    """A name as TOML."""
    return name if _BARE_KEY.fullmatch(name) else _text(name)


def written(value: Any) -> str:
    """A value as TOML."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{key(str(name))} = {written(inner)}" for name, inner in value.items())
        return "{" + ", ".join(pairs) + "}"
    text = str(value)
    return _text("\\" + text if _NEEDS_ESCAPE.fullmatch(text) else text)


def _text(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escape_unicode(quoted).replace("\n", "\\u000a").replace("\t", "\\u0009") + '"'
