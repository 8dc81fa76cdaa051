"""Which of the four ways a run is shown. Each is loaded where it is chosen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlflame.console.output import is_interactive

if TYPE_CHECKING:
    from rlflame.console.base import RunDisplay


def make_display(mode: str) -> RunDisplay:
    """The display for a mode; `auto` is live on a terminal that can, and lines otherwise."""
    if mode == "json":
        from rlflame.console.json_lines import JsonDisplay

        return JsonDisplay()
    if mode == "quiet":
        from rlflame.console.quiet import QuietDisplay

        return QuietDisplay()
    if mode == "live" or (mode == "auto" and is_interactive(sys.stdout)):
        from rlflame.console.live import LiveDisplay

        return LiveDisplay()
    from rlflame.console.plain import PlainDisplay

    return PlainDisplay()
