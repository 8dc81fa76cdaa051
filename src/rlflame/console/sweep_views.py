"""Which of the four ways a job of seeds is shown. Must not know: what they say."""

from __future__ import annotations

import sys

from rlflame.console.output import draws
from rlflame.console.sweep_base import SeedsDisplay
from rlflame.console.sweep_text import JsonSeeds, PlainSeeds, QuietSeeds


def choose(mode: str) -> SeedsDisplay:
    """The display for a mode, as console/views.py has them for a single run."""
    if mode == "json":
        return JsonSeeds()
    if mode == "quiet":
        return QuietSeeds()
    if mode == "live" or (mode == "auto" and draws(sys.stdout)):
        from rlflame.console.sweep_live import LiveSeeds

        return LiveSeeds()
    return PlainSeeds()
