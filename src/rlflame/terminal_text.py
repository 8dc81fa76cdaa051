"""Formats counts, sizes, returns and durations, and escapes control characters.

rlflame prints text from names, files, environments and workers. Such text may contain escape
sequences that move the cursor, recolour or clear the screen, or characters that reorder a line.
This module imports nothing from rlflame, so that every layer can use it.
"""

from __future__ import annotations

import re
from typing import IO, Any

#: C0 (except tab and newline) and C1 controls, DEL, bidirectional controls (UAX #9), the line and
#: paragraph separators, and lone surrogates, which no terminal encoding can represent.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_controls(text: str) -> str:
    r"""Escape control characters, except newlines and tabs, as \x1b or \u202e."""
    return _CONTROLS.sub(_escape, text)


def escape_line(text: str) -> str:
    r"""Escape control characters and newlines, for text that must stay on one line."""
    return escape_controls(text).replace("\n", "\\n")


def escape_unicode(text: str) -> str:
    r"""Escape control characters in the form \u001b, which JSON and TOML can read.

    Lone surrogates are not changed, because TOML cannot represent them and the json module escapes
    them itself.
    """
    return _CONTROLS.sub(
        lambda match: match[0] if match[0] >= "\ud800" else f"\\u{ord(match[0]):04x}", text
    )


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def format_size(size_bytes: float) -> str:
    """Format a size in bytes, for example as `93 MB` or `1.2 GB`."""
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:,.1f} GB"
    return f"{size_bytes / 1e6:,.0f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:,.0f} kB"


def format_count(number: int, noun: str) -> str:
    """Format a number and its noun, for example as `1 step` or `2,000 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_return(value: float, sign: str = "") -> str:
    """Format a return with one decimal, or with up to three significant digits if it is below 10.

    If `sign` is "+", positive numbers have a sign too.
    """
    text, short_text = f"{value:{sign}.3g}", f"{value:{sign},.1f}"
    return text if abs(value) < 10.0 and float(text) != float(short_text) else short_text


def format_duration(seconds: float) -> str:
    """Format a duration, for example as `0:05`, `12:34` or `3:04:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class EscapingStream:
    """A text stream that escapes control characters in everything written to it.

    Warnings, log records, tracebacks of threads and the output of libraries bypass rlflame's own
    printing, so the command line replaces sys.stdout and sys.stderr with such streams.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
