"""The contract of a command: how it ends. Each speaks with one voice and a fixed exit code.

0 good, 1 failed, 2 usage or config, 3 fleet unreachable, 129, 130 and 143 interrupted. Must not
know: what the commands do.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from rlflame.errors import Interrupted, RlflameError, documented, of_the_system

P = ParamSpec("P")


def spoken(command: Callable[P, None]) -> Callable[P, None]:
    """The command, with every way it can end turned into a sentence and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **given: P.kwargs) -> None:
        code = _ending(lambda: command(*args, **given), bool(given.get("debug")), given)
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


def _ending(work: Callable[[], None], debug: bool, given: dict[str, Any]) -> int:
    from rlflame.console.output import let_go_of_results, mute, say_failure

    wanted = bool(given.get("json_lines") or given.get("as_json"))

    def fail(failure: RlflameError, cause: BaseException) -> int:
        say_failure(failure, debug=debug, as_json=wanted and not documented(cause))
        return failure.exit_code

    try:
        _check_folder()
        work()
        if sys.stdout is not None:
            sys.stdout.flush()
    except RlflameError as error:
        return fail(error, error)
    except KeyboardInterrupt as error:
        return fail(Interrupted("Interrupted.", "type the same again", signal.SIGINT), error)
    except BrokenPipeError:
        mute(sys.stdout)
        return 1
    except MemoryError as error:
        less = "a smaller rollout.steps or rollout.num_slots, and of SAC a smaller sac.buffer_size"
        return fail(RlflameError("Memory ran out.", f"take less at a time: {less}"), error)
    except OSError as error:
        code = fail(of_the_system(error), error)
        let_go_of_results()
        return code
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        failure = RlflameError(
            f"Something went wrong inside rlflame ({said}).", "this is a bug; --debug shows where"
        )
        failure.__cause__ = error
        return fail(failure, error)
    return 0
