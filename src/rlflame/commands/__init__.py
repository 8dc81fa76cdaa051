"""The contract of a command: how it ends. Each speaks with one voice and a fixed exit code.

0 good, 1 failed, 2 usage or config, 3 fleet unreachable, 130 and 143 interrupted. Must not know:
what the commands do.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from rlflame.errors import Interrupted, RlflameError

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
    from rlflame.display.mouth import let_go_of_results, mute, say_failure

    as_json = bool(given.get("json_lines") or given.get("as_json"))
    try:
        _check_folder()
        work()
        if sys.stdout is not None:
            sys.stdout.flush()
    except RlflameError as error:
        say_failure(error, debug=debug, as_json=as_json and not error.documented)
        return error.exit_code
    except KeyboardInterrupt:
        interrupted = Interrupted("Interrupted.", "", signal.SIGINT)
        say_failure(interrupted, debug=debug, as_json=as_json)
        return interrupted.exit_code
    except BrokenPipeError:
        mute(sys.stdout)
        return 1
    except MemoryError:
        say_failure(
            RlflameError(
                "Memory ran out.",
                "take less at a time: a smaller rollout.steps or rollout.num_slots, and of SAC a "
                "smaller sac.buffer_size",
            ),
            debug=debug,
            as_json=as_json,
        )
        return 1
    except OSError as error:
        refused = RlflameError(f"The system said: {error}.")
        say_failure(refused, debug=debug, as_json=as_json)
        let_go_of_results()
        return 1
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        failure = RlflameError(
            f"Something went wrong inside rlflame ({said}).", "this is a bug; --debug shows where"
        )
        failure.__cause__ = error
        say_failure(failure, debug=debug, as_json=as_json)
        return 1
    return 0
