"""The tables of the reference: all settings, and all commands with their options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from typing import Any

from records import format_table
from typer.main import get_command
from typer.testing import CliRunner

from rlflame.cli.app import app

#: Options of almost all commands, described once.
COMMON_OPTIONS = ("--json", "--debug", "--help")


def make_settings() -> str:
    """A table for each section of the settings, in the order of the config."""
    result = CliRunner().invoke(app, ["config", "--json"])
    settings: list[dict[str, Any]] = json.loads(result.stdout)
    sections = [
        f"### `{name}`\n\n{_make_settings_table(rows)}"
        for name, rows in groupby(settings, key=lambda row: row["name"].rpartition(".")[0])
        if name
    ]
    top = _make_settings_table(row for row in settings if "." not in row["name"])
    return "\n\n".join([top, *sections])


def _make_settings_table(settings: Iterator[dict[str, Any]]) -> str:
    rows = [
        (
            f"`{setting['name'].rpartition('.')[2]}`",
            f"`{json.dumps(setting['default'])}`" if setting["default"] is not None else "",
            _escape(setting["range"]),
            _escape(setting["description"]),
        )
        for setting in settings
    ]
    return format_table(("setting", "default", "values", "description"), rows)


def make_commands() -> str:
    """The usage, the summary and the options of each command."""
    return "\n\n".join(_make_command(name, command) for name, command in _list_commands())


@cache
def _list_commands() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []

    def visit(name: str, command: Any) -> None:
        subcommands = getattr(command, "commands", {})
        if name != "rlflame" and (not subcommands or command.invoke_without_command):
            found.append((name, command))
        for key, subcommand in subcommands.items():
            visit(f"{name} {key}", subcommand)

    visit("rlflame", get_command(app))
    return found


def _make_command(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    summary = " ".join((command.help or "").split())
    rows = [
        (f"`{names.split(' <')[0]}`".replace("|", r"\|"), _escape(meaning))
        for parameter in command.params
        for record in [parameter.get_help_record(context)]
        if record is not None and not {*COMMON_OPTIONS} & {*parameter.opts}
        for names, meaning in [record]
    ]
    table = format_table(("option", "description"), rows) if rows else ""
    return f"### `{name}`\n\n`{usage}`\n\n{summary}\n\n{table}".rstrip()


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
