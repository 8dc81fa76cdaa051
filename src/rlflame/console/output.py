"""The output of every command.

A report goes to standard output; notes, warnings and errors go to standard error. Control
characters in any text are escaped here, so that no file, name or environment can drive the
terminal. Loads nothing heavy. Must not know: runs.
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

from rlflame.console.tracebacks import brief
from rlflame.errors import RlflameError
from rlflame.text import EscapingStream, escape_controls, escape_line, escape_unicode


def draws(stream: IO[str] | None) -> bool:
    """Whether it is a terminal that can move its cursor."""
    terminal = os.environ.get("TERM", "dumb")
    return stream is not None and stream.isatty() and terminal not in ("", "dumb")


def escape_standard_streams() -> None:
    """Replace sys.stdout and sys.stderr by streams that escape what anyone writes to them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, EscapingStream):
            setattr(sys, name, EscapingStream(stream))


def say(text: str) -> None:
    """One line of the result; a newline in it comes from a value, and is escaped."""
    say_lines(escape_line(text))


def say_lines(text: str) -> None:
    """Lines of the result. Nothing reports that the terminal is gone: nobody could read it."""
    if sys.stdout is None:
        return
    try:
        print(escape_controls(text), flush=True)
    except OSError as error:
        if error.errno != errno.EIO or not stat.S_ISCHR(os.fstat(sys.stdout.fileno()).st_mode):
            raise
        mute(sys.stdout)


def say_aside(text: str) -> None:
    """One line that is not part of the result; a reader that is gone is no error."""
    say_lines_aside(escape_line(text))


def say_lines_aside(text: str) -> None:
    """Lines that are not part of the result."""
    _say_if_heard(sys.stderr, text)


def say_failure(error: RlflameError, *, debug: bool = False, as_json: bool = False) -> None:
    """What ended a command, and what to type next."""
    if debug:
        say_lines_aside("".join(traceback.format_exception(error)).rstrip())
    if error.detail:
        say_lines_aside((error.detail if debug else brief(error.detail, error.message)).rstrip())
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
        print(escape_controls(text), file=stream, flush=True)
    except (OSError, ValueError) as error:
        mute(stream)
        if stream is sys.stdout and isinstance(error, OSError) and error.errno == errno.ENOSPC:
            say_aside(f"Standard output is lost from here on: {error.strerror}.")


def canvas() -> IO[str]:
    """Standard output for a display that moves the cursor and escapes text itself.

    That the terminal is gone is no error.
    """
    return cast("IO[str]", _Canvas(_unescaped(sys.stdout)))


def overwrite_line(stream: IO[str], text: str) -> None:
    """Replace the last line of a terminal."""
    with contextlib.suppress(OSError, ValueError):
        stream = _unescaped(stream)
        stream.write(f"\r\x1b[K{escape_line(text)}")
        stream.flush()


def _unescaped(stream: IO[str]) -> IO[str]:
    return stream.stream if isinstance(stream, EscapingStream) else stream


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
    """Lines of a run's report."""
    _say_if_heard(sys.stdout, text)


def as_json_text(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: NaN and infinity become null.

    All of it is ASCII; json leaves DEL alone of the control characters.
    """
    return escape_unicode(json.dumps(_finite(value), indent=indent))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
