"""The Rich console of the live displays. Must not know: what it shows."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rlflame.console.output import make_display_stream
from rlflame.terminal_text import escape_controls


class EscapingConsole(Console):
    """A console that escapes control characters in text, and keeps those that Rich adds.

    Rich marks its cursor movements as control segments and adds colours when it writes segments,
    so a control character in the text of any other segment comes from a value.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(escape_controls(segment.text), segment.style)


def make_console() -> Console:
    """A console on standard output that takes no markup and no emoji codes from text."""
    return EscapingConsole(markup=False, emoji=False, highlight=False, file=make_display_stream())
