"""The one mouth: how anything is said.

A report goes to standard output; notes, warnings and errors go to standard error. Loads nothing
heavy. Must not know: runs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

from rlflame.display.tracebacks import brief
from rlflame.errors import RlflameError


def draws(stream: IO[str] | None) -> bool:
    """Whether it is a terminal that can move its cursor."""
    terminal = os.environ.get("TERM", "dumb")
    return stream is not None and stream.isatty() and terminal not in ("", "dumb")


def say(text: str) -> None:
    """Part of the result. A terminal that is gone has nobody who could be told that it is."""
    if sys.stdout is None:
        return
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno != errno.EIO or not stat.S_ISCHR(os.fstat(sys.stdout.fileno()).st_mode):
            raise
        mute(sys.stdout)


def say_aside(text: str) -> None:
    """Not part of the result; whether anybody hears it does not matter."""
    _say_if_heard(sys.stderr, text)


def say_failure(error: RlflameError, *, debug: bool = False, as_json: bool = False) -> None:
    """What ended a command, and what to type next."""
    if debug:
        say_aside("".join(traceback.format_exception(error)).rstrip())
    if error.detail:
        say_aside((error.detail if debug else brief(error.detail, error.message)).rstrip())
    say_aside(f"rlflame: {error.message}")
    if error.hint:
        say_aside(f"  hint: {error.hint}")
    if as_json:
        say_as_json(error)


def say_as_json(error: RlflameError) -> None:
    """The last line of what a program reads."""
    said = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    _say_if_heard(sys.stdout, as_json_text({"event": "error", **said}))


def _say_if_heard(stream: IO[str] | None, text: str) -> None:
    """A run goes on when whoever listened has gone; where there is no room, that is said."""
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError) as error:
        mute(stream)
        if stream is sys.stdout and isinstance(error, OSError) and error.errno == errno.ENOSPC:
            say_aside(f"Standard output is lost from here on: {error.strerror}.")


def canvas() -> IO[str]:
    """Standard output for whoever draws on it; that the terminal is gone is no error."""
    return cast("IO[str]", _Canvas(sys.stdout))


class _Canvas:
    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._gone():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._gone():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _gone(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            mute(self._stream)


def mute(stream: IO[str]) -> None:
    """Let go of a stream that nobody reads, so that Python does not try again when it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def let_go_of_results() -> None:
    """What standard output has no room for is not tried again when Python ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        mute(sys.stdout)


def takes(text: str) -> bool:
    """Whether standard output has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def report(text: str) -> None:
    """A line of a run's report."""
    _say_if_heard(sys.stdout, text)


def as_json_text(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: NaN and infinity become null."""
    return json.dumps(_finite(value), indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
