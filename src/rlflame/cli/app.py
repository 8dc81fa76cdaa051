"""The command line: which commands there are.

Imports nothing heavy, so that help comes at once; each command imports its parts when it runs.
Must not know: how anything is done.
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
from rlflame.cli import bench, bench_learners, trust
from rlflame.cli.cluster_check import cluster_check
from rlflame.cli.errors import spoken
from rlflame.cli.eval import evaluate
from rlflame.cli.export import export
from rlflame.cli.inspect import inspect
from rlflame.cli.listings import config, envs, runs
from rlflame.cli.plot import plot
from rlflame.cli.render import render
from rlflame.cli.report import report
from rlflame.cli.train import resume, train

if TYPE_CHECKING:
    from rlflame.fleet.prestart import HeadStart

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


def _version(wanted: bool) -> None:
    if wanted:
        from rlflame.console.output import say

        say(f"rlflame {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version


app.command("train")(spoken(train))
app.command("resume")(spoken(resume))
app.command("eval")(spoken(evaluate))
app.command("render")(spoken(render))
app.command("export")(spoken(export))
app.command("inspect")(spoken(inspect))
app.command("plot")(spoken(plot))
# Whatever looks like an option and is none, such as --vs, stays among the arguments, in its place.
app.command("report", context_settings={"ignore_unknown_options": True})(spoken(report))
bench.group.command("learners")(spoken(bench_learners.learners))
app.add_typer(bench.group, name="bench")
app.command("runs")(spoken(runs))
app.command("envs")(spoken(envs))
app.command("config")(spoken(config))
trust.group.command("add")(spoken(trust.add))
trust.group.command("remove")(spoken(trust.remove))
trust.group.command("list")(spoken(trust.show))
app.add_typer(trust.group, name="trust")
app.command("cluster-check")(spoken(cluster_check))


def main(early: HeadStart | None = None) -> None:
    """With the workers that have begun before anything was read, if any have."""
    try:
        _prepare_streams()
        code = app(prog_name="rlflame", standalone_mode=False, obj=early)
    except KeyboardInterrupt:  # before any command has begun
        code = 130
    except OSError as error:  # from --help and --version, which run no command
        code = _say_unwritten(error)
    except Exception as error:
        # A word on the command line that means nothing; the class has no public name.
        if not hasattr(error, "format_message"):
            raise
        code = _say_usage(error)
    _leave(int(code or 0))


def _leave(code: int) -> None:
    """End the process. Threads of gRPC and Arrow would go on while the interpreter takes itself
    apart, and now and then crash in what is left of it, long after all was said and closed."""
    if "grpc" in sys.modules or "pyarrow" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _say_unwritten(error: OSError) -> int:
    """Standard output could not be written; nobody is left to tell where a pipe was closed."""
    from rlflame.console.output import let_go_of_results, say_failure
    from rlflame.errors import of_the_system

    if not isinstance(error, BrokenPipeError):
        say_failure(of_the_system(error), as_json="--json" in sys.argv)
    let_go_of_results()
    return 1


def _say_usage(error: Any) -> int:
    from rlflame.console.output import say_failure, say_lines_aside
    from rlflame.errors import ConfigError

    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
        say_lines_aside(str(error.format_message()))
        return int(error.exit_code)
    if str(error.message).startswith("Input should"):
        error.message = _misread(error)
    message = str(error.format_message())
    if message[-1:] not in ".?)":
        message += "."
    command = error.ctx.command_path if error.ctx is not None else "rlflame"
    say_failure(ConfigError(message, f"{command} --help"), as_json="--json" in sys.argv)
    return int(error.exit_code)


def _misread(error: Any) -> str:
    """What was typed where a number belongs, which the message leaves out."""
    names = getattr(error.param, "opts", ())
    seen = ""
    for word, after in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            seen = value if equals else after
    bound = re.match(r"Input should be ((?:greater|less) than .*)", error.message)
    if bound:
        return f"{seen} is not {bound[1].rstrip('.')}."
    kind = "whole number" if "integer" in error.message else "number"
    return f"{seen!r} is no {kind}."


def _prepare_streams() -> None:
    """No text is worth an error about its encoding, and none may drive the terminal."""
    from rlflame.console.output import escape_standard_streams

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    escape_standard_streams()
