"""Prints the output of every command.

Results go to standard output; notes, warnings and errors go to standard error. All control
characters are escaped here, so that no file, name or environment can control the terminal. This
module imports only light modules.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

import rlflame
from rlflame.errors import RlflameError
from rlflame.terminal_text import EscapingStream, escape_controls, escape_line, escape_unicode

#: Environment tracebacks hide the frames of files whose paths contain one of these texts. On other
#: machines, rlflame may be in another folder.
_HIDDEN_PATHS = (str(Path(rlflame.__file__).parent), "/rlflame/rollout/", "/gymnasium/")


def is_interactive(stream: IO[str] | None) -> bool:
    """Return whether the stream is a terminal that can move its cursor."""
    terminal_type = os.environ.get("TERM", "dumb")
    return stream is not None and stream.isatty() and terminal_type not in ("", "dumb")


def escape_standard_streams() -> None:
    """Replace sys.stdout and sys.stderr with streams that escape control characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, EscapingStream):
            setattr(sys, name, EscapingStream(stream))


def print_result(text: str) -> None:
    """Print one line of the result, and escape newlines in it."""
    print_result_lines(escape_line(text))


def print_result_lines(text: str) -> None:
    """Print lines of the result; a failed write is an error."""
    _print(sys.stdout, text, is_result=True)


def print_report(text: str) -> None:
    """Print lines of a run's report; the run continues even if the write fails."""
    _print(sys.stdout, text)


def print_note(text: str) -> None:
    """Print one line that is not part of the result; ignore a failed write."""
    print_note_lines(escape_line(text))


def print_note_lines(text: str) -> None:
    """Print lines that are not part of the result."""
    _print(sys.stderr, text)


def _print(stream: IO[str] | None, text: str, *, is_result: bool = False) -> None:
    if stream is None:
        return
    try:
        print(escape_controls(text), file=stream, flush=True)
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        # If the terminal itself is gone, nobody can read the error.
        if is_result and not (
            number == errno.EIO and stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)
        ):
            raise
        mute(stream)
        if stream is sys.stdout and number == errno.ENOSPC:
            print_note(f"Standard output is lost from here on: {os.strerror(number)}.")


def print_error(error: RlflameError, *, debug: bool = False, as_json: bool = False) -> None:
    """Print an error and its hint; with `as_json`, also print a line of JSON."""
    if debug:
        print_note_lines("".join(traceback.format_exception(error)).rstrip())
    if error.detail:
        detail = error.detail if debug else shorten_tracebacks(error.detail)
        print_note_lines(detail.rstrip())
    print_note(f"rlflame: {error.message}")
    if error.hint:
        print_note(f"  hint: {error.hint}")
    if as_json:
        fields = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        print_report(as_json_text({"event": "error", **fields}))


def shorten_tracebacks(text: str) -> str:
    """Shorten tracebacks to the frames outside rlflame and Gymnasium."""
    lines, is_hidden = [], False
    for line in text.split("\n"):
        if line.startswith('  File "'):
            is_hidden = any(path in line for path in _HIDDEN_PATHS)
        elif not line.startswith("    "):
            is_hidden = line == "Traceback (most recent call last):"
        if not is_hidden:
            lines.append(line)
    return "\n".join(lines)


def make_display_stream() -> IO[str]:
    """Return standard output for a display that escapes text itself.

    A failed write is ignored.
    """
    return cast("IO[str]", _DisplayStream(_unwrap_stream(sys.stdout)))


def overwrite_line(stream: IO[str], text: str) -> None:
    """Replace the last line of a terminal."""
    with contextlib.suppress(OSError, ValueError):
        stream = _unwrap_stream(stream)
        stream.write(f"\r\x1b[K{escape_line(text)}")
        stream.flush()


def _unwrap_stream(stream: IO[str]) -> IO[str]:
    return stream.stream if isinstance(stream, EscapingStream) else stream


class _DisplayStream:
    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _mute_when_gone(self._stream):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _mute_when_gone(self._stream):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _mute_when_gone(stream: IO[str]) -> Iterator[None]:
    try:
        yield
    except OSError:
        mute(stream)


def mute(stream: IO[str]) -> None:
    """Redirect a stream to /dev/null, so that Python can flush it at exit."""
    with contextlib.suppress(OSError, ValueError):
        null_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_fd, stream.fileno())
        os.close(null_fd)


def discard_unwritten_results() -> None:
    """Drop output that could not be written, so that Python does not retry at exit."""
    if sys.stdout is not None:
        with _mute_when_gone(sys.stdout):
            sys.stdout.flush()


def can_encode(text: str) -> bool:
    """Return whether standard output can encode these characters."""
    with contextlib.suppress(UnicodeEncodeError, LookupError):
        return bool(text.encode(getattr(sys.stdout, "encoding", None) or "ascii"))
    return False


def as_json_text(value: Any, indent: int | None = None) -> str:
    """Return JSON that every parser accepts: NaN and infinity become null.

    The text is ASCII. The json module does not escape DEL, so it is escaped here.
    """
    finite = json.loads(json.dumps(value, default=asdict), parse_constant=lambda _: None)
    return escape_unicode(json.dumps(finite, indent=indent))


#: If fewer columns than this remain beside a name, its text is printed below the name.
_MIN_TEXT_COLUMNS = 28


def format_pairs(
    pairs: Sequence[tuple[str, str]], columns: int | None = None, word_columns: int = 0
) -> list[str]:
    """Return names and texts side by side, or stacked in a narrow terminal."""
    columns = columns or find_terminal_columns()
    pairs = [(escape_line(word), escape_line(text)) for word, text in pairs]
    width = max(word_columns, *(len(word) for word, _ in pairs))
    is_beside = columns is None or columns - width - 4 >= _MIN_TEXT_COLUMNS
    indent = " " * (width + 4 if is_beside else 4)
    lines = []
    for word, text in pairs:
        # A command stays on one line, so that it can be copied.
        is_command = text.startswith("rlflame ")
        block = indent + text if is_command else wrap_text(text, columns, indent)
        lines += [f"  {word:{width}}  {block.lstrip()}"] if is_beside else [f"  {word}", block]
    return lines


def wrap_text(text: str, columns: int | None = None, indent: str = "") -> str:
    """Wrap text at the terminal width; continuation lines are always indented."""
    columns = columns or find_terminal_columns()
    text = escape_line(text)
    if columns is None or len(indent + text) <= columns:
        return indent + text
    hanging_indent = indent or "  "
    return textwrap.fill(
        " ".join(text.split()),
        max(columns, len(hanging_indent) + 1),
        initial_indent=indent,
        subsequent_indent=hanging_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def find_terminal_columns() -> int | None:
    """Return the terminal's width; None if standard output is not a terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def format_table(rows: Sequence[tuple[str, ...]], columns: int | None = None) -> list[str]:
    """Return a line per row; drop the last columns if the table is too wide."""
    rows = [tuple(escape_line(cell) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while columns is not None and sum(widths) + 2 * (len(widths) - 1) > columns:
        widths.pop()
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
