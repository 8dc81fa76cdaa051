"""`rlflame trust`: the modules that files may ask for in every command."""

from __future__ import annotations

from typing import Annotated

import typer

Modules = Annotated[list[str], typer.Argument(metavar="MODULE...", help="Names of modules.")]

group = typer.Typer(
    help="Manage the modules that checkpoints, configs and run folders may import.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def add(modules: Modules) -> None:
    """Trust modules in every command: importing them runs their code."""
    from rlflame.config import module_trust

    module_trust.add_trusted(modules)


def remove(modules: Modules) -> None:
    """Stop trusting modules."""
    from rlflame.config import module_trust

    module_trust.remove_trusted(modules)


def show() -> None:
    """List the trusted modules, one a line."""
    from rlflame.config import module_trust
    from rlflame.console.output import print_result

    for module in module_trust.read_trusted_modules():
        print_result(module)
