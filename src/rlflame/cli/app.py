"""The Typer application: its commands and their exit codes.

Every error prints a message and sets an exit code: 1 (failure), 2 (usage or config), 3 (fleet
unreachable), or 129, 130 or 143 (interrupted). Success is 0. Help must appear immediately, so a
command imports its dependencies only when it runs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from rlflame import __version__
from rlflame.cli import bench, listings
from rlflame.cli.cluster_check import cluster_check
from rlflame.cli.eval import evaluate
from rlflame.cli.export import export
from rlflame.cli.inspect import inspect
from rlflame.cli.options import HelpCommand, PanelCommand
from rlflame.cli.plot import plot
from rlflame.cli.render import render
from rlflame.cli.report import report
from rlflame.cli.train import resume, train
from rlflame.config.synonyms import find_synonyms, format_synonym_hint
from rlflame.console.output import (
    discard_unwritten_results,
    escape_standard_streams,
    mute,
    print_error,
    print_result,
    print_result_lines,
)
from rlflame.errors import ConfigError, RlflameError, from_exception, is_documented

if TYPE_CHECKING:
    from rlflame.fleet.prestart import PrestartPool

P = ParamSpec("P")

#: Options of `rlflame train` that users may also expect in `rlflame resume`.
_RECIPE_OPTIONS = frozenset(
    ("--algo", "--config", "--device", "--env", "--horizon", "--preset", "--seed")
)

app = typer.Typer(
    name="rlflame",
    help="Train reinforcement-learning policies with bit-for-bit reproducible results.",
    epilog="Get started: rlflame train --env hopper",
    no_args_is_help=True,
    rich_markup_mode=None,  # importing Rich takes longer than all of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print_result(f"rlflame {__version__}")
        raise typer.Exit


@app.callback()
def _parse_root_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version


def _check_folder() -> None:
    """Raise an error if the current folder was deleted, as relative paths would fail."""
    try:
        os.getcwd()
    except FileNotFoundError:
        message = "The current folder no longer exists."
        raise RlflameError(message, "cd to another folder") from None


def handle_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command so that every error prints a message and sets the exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        try:
            _check_folder()
            command(*args, **options)
            if sys.stdout is not None:
                sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except BrokenPipeError:
            mute(sys.stdout)
            raise typer.Exit(1) from None
        except (Exception, KeyboardInterrupt) as error:
            failure = from_exception(error)
            as_json = bool(options.get("json_lines") or options.get("as_json"))
            as_json = as_json and not is_documented(error)
            print_error(failure, debug=bool(options.get("debug")), as_json=as_json)
            if isinstance(error, OSError):
                discard_unwritten_results()
            raise typer.Exit(failure.exit_code) from None

    return run


GROUP_SETTINGS: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}
COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "render": render,
    "export": export,
    "inspect": inspect,
    "plot": plot,
    "report": report,
    "runs": listings.runs,
    "envs": listings.envs,
    "config": listings.config,
    "cluster-check": cluster_check,
}
for name, command in COMMANDS.items():
    # `report` parses --vs itself, because several runs may follow it.
    settings = {"ignore_unknown_options": True} if name == "report" else {}
    kind = PanelCommand if name in ("train", "resume") else HelpCommand
    app.command(name, cls=kind, context_settings=settings)(handle_errors(command))
bench_group = typer.Typer(invoke_without_command=True, **GROUP_SETTINGS)
bench_group.callback()(handle_errors(bench.bench))
for command in (bench.rollouts, bench.scaling, bench.replay, bench.learners):
    bench_group.command(cls=HelpCommand)(handle_errors(command))
app.add_typer(bench_group, name="bench")
trust_group = typer.Typer(
    help="Manage the Python modules that you trust.",
    **GROUP_SETTINGS,
)
trust_group.command("add", cls=HelpCommand)(handle_errors(listings.add))
trust_group.command("remove", cls=HelpCommand)(handle_errors(listings.remove))
trust_group.command("list", cls=HelpCommand)(handle_errors(listings.show))
app.add_typer(trust_group, name="trust")


def main(head_start: PrestartPool | None = None) -> None:
    """Run the command line; `head_start` holds workers started before the imports."""
    try:
        _prepare_streams()
        code = _run_app(head_start)
    except KeyboardInterrupt:  # before a command runs
        code = 130
    except OSError as error:  # from help texts and --version, which run no command
        if not isinstance(error, BrokenPipeError):
            print_error(from_exception(error), as_json="--json" in sys.argv)
        discard_unwritten_results()
        code = 1
    _exit_process(code)


def _run_app(head_start: PrestartPool | None) -> int:
    """Run the command of the arguments, and return the exit code."""
    try:
        return int(app(prog_name="rlflame", standalone_mode=False, obj=head_start) or 0)
    except Exception as error:
        # A usage error of Typer, whose class has no public name.
        if not hasattr(error, "format_message"):
            raise
        return _print_usage_error(error)


def _exit_process(code: int) -> None:
    """End the process; skip Python's shutdown if gRPC or Arrow could crash it."""
    if "grpc" in sys.modules or "pyarrow" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _print_usage_error(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help text
        print_result_lines(str(error.format_message()))
        return 0
    message = str(error.format_message())
    message += "" if message[-1:] in ".?)" else "."
    command = error.ctx.command_path if error.ctx is not None else "rlflame"
    option = str(getattr(error, "option_name", ""))
    settings = find_synonyms(option)
    hint = format_synonym_hint(settings) if settings else f"{command} --help"
    if command == "rlflame resume" and option in _RECIPE_OPTIONS:
        message = f"A resumed run keeps its recipe, so rlflame resume has no option {option}."
        command = f"rlflame train --config RUN/config.toml --init-from RUN {option} ..."
        hint = f"start a new run from its policy: {command}"
    print_error(ConfigError(message, hint), as_json="--json" in sys.argv)
    return int(error.exit_code)


def _prepare_streams() -> None:
    """Make the standard streams escape control and unencodable characters."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    escape_standard_streams()
