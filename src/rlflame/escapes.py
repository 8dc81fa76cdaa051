"""Visible escapes for characters that a terminal obeys instead of showing.

Names, files, environments and workers supply text that rlflame prints. Such text may hold escape
sequences that move the cursor, recolour or clear the screen, or characters that reorder a line.
Imports nothing of rlflame, so that every layer may use it.
"""

from __future__ import annotations

import re
from typing import IO, Any

#: C0 and C1 controls except tab and newline, DEL, bidirectional controls (UAX #9), the line and
#: paragraph separators, and lone surrogates, which no encoding of a terminal has.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_controls(text: str) -> str:
    r"""The text with control characters as \x1b or \u202e; newlines and tabs stay."""
    return _CONTROLS.sub(_escape, text)


def escape_line(text: str) -> str:
    r"""The same for text that must stay in one line: a newline becomes \n."""
    return escape_controls(text).replace("\n", "\\n")


def escape_unicode(text: str) -> str:
    r"""The text with control characters as \u001b, the form that JSON and TOML read back.

    Lone surrogates stay: TOML has no form for them, and json escapes them itself.
    """
    return _CONTROLS.sub(
        lambda match: match[0] if match[0] >= "\ud800" else f"\\u{ord(match[0]):04x}", text
    )


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class EscapingStream:
    """A text stream that escapes control characters in everything that is written to it.

    Warnings, log records, tracebacks of threads and output of libraries reach a terminal through
    sys.stdout and sys.stderr alone, so the command line replaces both by such streams.
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
