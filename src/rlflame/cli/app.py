"""The command line: which commands there are.

Imports nothing heavy, so that help comes at once; each command imports its parts when it runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlflame import __version__
from rlflame.cli import bench, trust
from rlflame.cli.cluster_check import cluster_check
from rlflame.cli.errors import handle_errors
from rlflame.cli.eval import evaluate
from rlflame.cli.export import export
from rlflame.cli.inspect import inspect
from rlflame.cli.listings import config, envs, runs
from rlflame.cli.plot import plot
from rlflame.cli.render import render
from rlflame.cli.report import report
from rlflame.cli.train import resume, train

if TYPE_CHECKING:
    from rlflame.fleet.prestart import PrestartPool

app = typer.Typer(
    name="rlflame",
    help="Reinforcement learning from one command, with the same result to the last bit.",
    epilog="Begin with: rlflame train --env hopper",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # Rich takes longer to load than the whole help may take
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from rlflame.console.output import print_result

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


app.command("train")(handle_errors(train))
app.command("resume")(handle_errors(resume))
app.command("eval")(handle_errors(evaluate))
app.command("render")(handle_errors(render))
app.command("export")(handle_errors(export))
app.command("inspect")(handle_errors(inspect))
app.command("plot")(handle_errors(plot))
# Whatever looks like an option and is none, such as --vs, stays among the arguments, in its place.
app.command("report", context_settings={"ignore_unknown_options": True})(handle_errors(report))
app.add_typer(bench.group, name="bench")
app.command("runs")(handle_errors(runs))
app.command("envs")(handle_errors(envs))
app.command("config")(handle_errors(config))
trust.group.command("add")(handle_errors(trust.add))
trust.group.command("remove")(handle_errors(trust.remove))
trust.group.command("list")(handle_errors(trust.show))
app.add_typer(trust.group, name="trust")
app.command("cluster-check")(handle_errors(cluster_check))


def main(head_start: PrestartPool | None = None) -> None:
    """With the workers that have begun before anything was read, if any have."""
    try:
        _prepare_streams()
        code = app(prog_name="rlflame", standalone_mode=False, obj=head_start)
    except KeyboardInterrupt:  # before any command has begun
        code = 130
    except OSError as error:  # from --help and --version, which run no command
        code = _print_write_error(error)
    except Exception as error:
        # A word on the command line that means nothing; the class has no public name.
        if not hasattr(error, "format_message"):
            raise
        code = _print_usage_error(error)
    _exit_process(int(code or 0))


def _exit_process(code: int) -> None:
    """End the process. Threads of gRPC and Arrow would go on while the interpreter takes itself
    apart, and now and then crash in what is left of it, long after all was said and closed."""
    if "grpc" in sys.modules or "pyarrow" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _print_write_error(error: OSError) -> int:
    """Standard output could not be written; nobody is left to tell where a pipe was closed."""
    from rlflame.console.output import discard_unwritten_results, print_error
    from rlflame.errors import from_os_error

    if not isinstance(error, BrokenPipeError):
        print_error(from_os_error(error), as_json="--json" in sys.argv)
    discard_unwritten_results()
    return 1


def _print_usage_error(error: Any) -> int:
    from rlflame.console.output import print_error, print_note_lines
    from rlflame.errors import ConfigError

    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
        print_note_lines(str(error.format_message()))
        return int(error.exit_code)
    if str(error.message).startswith("Input should"):
        error.message = _describe_bad_number(error)
    message = str(error.format_message())
    if message[-1:] not in ".?)":
        message += "."
    command = error.ctx.command_path if error.ctx is not None else "rlflame"
    print_error(ConfigError(message, f"{command} --help"), as_json="--json" in sys.argv)
    return int(error.exit_code)


def _describe_bad_number(error: Any) -> str:
    """What was typed where a number belongs, which the message leaves out."""
    names = getattr(error.param, "opts", ())
    value_text = ""
    for word, next_word in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            value_text = value if equals else next_word
    bound = re.match(r"Input should be ((?:greater|less) than .*)", error.message)
    if bound:
        return f"{value_text} is not {bound[1].rstrip('.')}."
    kind = "whole number" if "integer" in error.message else "number"
    return f"{value_text!r} is no {kind}."


def _prepare_streams() -> None:
    """No text is worth an error about its encoding, and none may drive the terminal."""
    from rlflame.console.output import escape_standard_streams

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    escape_standard_streams()
