"""Reads and writes settings as TOML; written values read back unchanged.

TOML has no null. An absent value is left out, or written as the word "none" if a reader would
otherwise use another value. Elsewhere, the literal text "none" is written with a leading backslash.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlflame.config import regular_file
from rlflame.config.algorithms import TRAITS
from rlflame.errors import ConfigError
from rlflame.terminal_text import escape_unicode

NONE = "none"
_ESCAPED_NONE = re.compile(r"\\+none")
_NEEDS_ESCAPE = re.compile(r"\\*none")
_KWARGS = "learning.environment.kwargs"
#: A key that tomllib reads without quotes.
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
#: The tokens that can belong to a key; `other` ends a key.
_TOKENS = re.compile(
    r"""(?P<text>\"{3}(?:\\[\s\S]|(?!\"{3})[^\\])*+(?:\"{3,5})?|'{3}(?:(?!'{3})[\s\S])*+(?:'{3,5})?"""
    r"""|"(?:\\.|[^"\\\n])*+"?|'[^'\n]*+'?)"""
    r"""|(?P<comment>\#[^\n]*+)|(?P<word>[A-Za-z0-9_-]++)|(?P<space>[ \t]++)|(?P<dot>\.)"""
    r"""|(?P<other>[\s\S])"""
)
#: Limits that no real config reaches.
_MOST_PARTS = 32
_DEEPEST = 64
#: Python reads 00 as a number, but it is more likely part of a name, a date or a hash.
_LEADING_ZEROS = re.compile(r"[+-]?0[0-9_]")
_LONGEST_LITERAL = 65_536
#: Words that are read as values in their usual spelling, such as true and False.
_KEYWORDS = {"true", "false", "none", "null", "nil"}


def read_file(path: Path) -> dict[str, Any]:
    try:
        return parse(regular_file.read_text(path, regular_file.SETTINGS_BYTES))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", "check --config") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.", "check --config") from error


def parse(text: str) -> dict[str, Any]:
    """Parse TOML text into tables; raise a ValueError if it exceeds the limits."""
    _check_keys(text)
    tables = tomllib.loads(text)
    _check_values(tables)
    result: dict[str, Any] = _replace_none(tables)
    return result


def _check_keys(text: str) -> None:
    """Limit the number of parts of a key, as tomllib's time grows with its square."""
    parts = 0
    for token in _TOKENS.finditer(text):
        if token.lastgroup == "dot":
            parts += 1
        elif token.lastgroup == "other":
            parts = 0
        if parts > _MOST_PARTS:
            line = text.count("\n", 0, token.start()) + 1
            raise ValueError(f"line {line} has a key of more than {_MOST_PARTS} parts")


def _check_values(value: Any, depth: int = 0) -> None:
    """Limit the depth of tables and lists, and the size of integers."""
    if depth > _DEEPEST:
        raise ValueError(f"tables or lists are nested more than {_DEEPEST} levels deep")
    # Python cannot print integers of more than 4,300 digits. The fields validate smaller ones.
    if isinstance(value, int) and abs(value) >= 10**400:
        raise ValueError(f"a number of {value.bit_length()} bits is too large")
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_values(item, depth + 1)


def parse_value(text: str) -> Any:
    """Parse a TOML value or a Python literal; other text is a string without quotes.

    Raise ValueError for text that starts like a list, a table, a tuple or a quoted string, or is a
    misspelt true, false or none, but cannot be parsed.
    """
    try:
        _check_keys(text)
        table = tomllib.loads(f"x = {text}")
        _check_values(table)
    except (ValueError, RecursionError):
        return _replace_none(_parse_literal(text))
    value = table["x"] if len(table) == 1 else text
    # No setting is a date, so text that looks like one stays text.
    is_plain = isinstance(value, str | bool | int | float | list | dict)
    return _replace_none(value if is_plain else text)


def _parse_literal(text: str) -> Any:
    """Parse a Python literal such as False, None, (0.5, 2.0) or {"a": 1}."""
    try:
        is_text = _LEADING_ZEROS.match(text) or len(text) > _LONGEST_LITERAL
        value = text if is_text else _make_plain_value(ast.literal_eval(text))
        _check_values(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        is_misspelt = text.lower() in _KEYWORDS and text != NONE
        if is_misspelt or text[:1] in tuple("([{\"'"):
            spelling = format_value(text)
            raise ValueError(
                f"{text[:80]!r} is neither a TOML value nor a Python literal; to pass it as text, "
                f"write {spelling if len(spelling) < 80 else 'it in quotes'}"
            ) from error
        return text
    return value


def _make_plain_value(value: Any) -> Any:
    """Convert tuples to lists; raise ValueError for values that a recipe cannot contain."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("the keys of a table must be text")
        return {key: _make_plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain_value(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"a recipe cannot contain a {type(value).__name__}")


def describe_type(value: Any) -> str:
    """Return the type of a parsed value in the words of the documentation."""
    if value is None:
        return NONE
    names = {bool: "boolean", int: "integer", float: "number", str: "text"}
    other = "table" if isinstance(value, Mapping) else "list"
    return next((name for kind, name in names.items() if isinstance(value, kind)), other)


def to_toml(config: BaseModel, base: Mapping[str, Any]) -> str:
    """Return a config as TOML that reads back as the same config.

    `base` contains the values that a reader uses for settings that are left out.
    """
    lines: list[str] = []
    _write_table(config.model_dump(mode="json"), "", lines, base)
    return "\n".join(lines).strip() + "\n"


def _replace_none(value: Any) -> Any:
    """Replace the word `none` with None; remove one backslash from an escaped `none`."""
    if isinstance(value, Mapping):
        return {key: _replace_none(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace_none(inner) for inner in value]
    if value == NONE:
        return None
    if isinstance(value, str) and _ESCAPED_NONE.fullmatch(value):
        return value[1:]
    return value


def _write_table(
    table: Mapping[str, Any], path: str, lines: list[str], base: Mapping[str, Any]
) -> None:
    inner = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    is_kwargs = path.startswith(_KWARGS)
    plain = {
        name: value
        for name, value in table.items()
        if name not in inner and (value is not None or is_kwargs or base.get(name) is not None)
    }
    if path and (plain or not inner):
        lines += ["", f"[{path}]"]
    # In the section of an algorithm, every text is one of the choices of a setting.
    has_choices = path.removeprefix("learning.") in TRAITS
    for name, value in plain.items():
        text = f'"{NONE}"' if has_choices and value == NONE else format_value(value)
        lines.append(f"{format_key(name)} = {text}")
    for name, value in inner.items():
        inner_path = f"{path}.{format_key(name)}" if path else format_key(name)
        inner_base = base.get(name)
        _write_table(value, inner_path, lines, inner_base if isinstance(inner_base, dict) else {})


def format_key(name: str) -> str:
    """Format a key as TOML."""
    return name if _BARE_KEY.fullmatch(name) else _format_string(name)


def format_value(value: Any) -> str:
    """Format a value as TOML."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = (
            f"{format_key(str(name))} = {format_value(inner)}" for name, inner in value.items()
        )
        return "{" + ", ".join(pairs) + "}"
    text = str(value)
    return _format_string("\\" + text if _NEEDS_ESCAPE.fullmatch(text) else text)


def _format_string(text: str) -> str:
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escape_unicode(text).replace("\n", "\\u000a").replace("\t", "\\u0009") + '"'
