"""How commands end: every error becomes a sentence and a fixed exit code.

0 good, 1 failed, 2 usage or config, 3 fleet unreachable, 129, 130 and 143 interrupted.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from rlflame.errors import Interruption, RlflameError, from_os_error, is_documented

P = ParamSpec("P")


def handle_errors(command: Callable[P, None]) -> Callable[P, None]:
    """The command, with every way it can end turned into a sentence and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        code = _run_command(lambda: command(*args, **options), bool(options.get("debug")), options)
        if code:
            raise typer.Exit(code)

    return run


def _check_folder() -> None:
    """Where the shell stands in a folder that is gone, no name in it is found and no file made."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RlflameError(
            "The current folder is gone: removed, or renamed.", "cd to another one"
        ) from None


def _run_command(work: Callable[[], None], debug: bool, options: dict[str, Any]) -> int:
    from rlflame.console.output import discard_unwritten_results, mute, print_error

    as_json = bool(options.get("json_lines") or options.get("as_json"))

    def fail(failure: RlflameError, cause: BaseException) -> int:
        print_error(failure, debug=debug, as_json=as_json and not is_documented(cause))
        return failure.exit_code

    try:
        _check_folder()
        work()
        if sys.stdout is not None:
            sys.stdout.flush()
    except RlflameError as error:
        return fail(error, error)
    except KeyboardInterrupt as error:
        return fail(Interruption("Interrupted.", "type the same again", signal.SIGINT), error)
    except BrokenPipeError:
        mute(sys.stdout)
        return 1
    except MemoryError as error:
        less = "a smaller rollout.steps or rollout.num_slots, and of SAC a smaller sac.buffer_size"
        return fail(RlflameError("Memory ran out.", f"take less at a time: {less}"), error)
    except OSError as error:
        code = fail(from_os_error(error), error)
        discard_unwritten_results()
        return code
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        summary = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        failure = RlflameError(
            f"Something went wrong inside rlflame ({summary}).",
            "this is a bug; --debug shows where",
        )
        failure.__cause__ = error
        return fail(failure, error)
    return 0
