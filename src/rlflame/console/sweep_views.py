"""Which of the four ways a job of seeds is shown. Must not know: what they say."""

from __future__ import annotations

import sys

from rlflame.console.output import is_interactive
from rlflame.console.sweep_base import SweepDisplay
from rlflame.console.sweep_displays import JsonSweepDisplay, PlainSweepDisplay, QuietSweepDisplay


def make_sweep_display(mode: str) -> SweepDisplay:
    """The display for a mode, as console/views.py has them for a single run."""
    if mode == "json":
        return JsonSweepDisplay()
    if mode == "quiet":
        return QuietSweepDisplay()
    if mode == "live" or (mode == "auto" and is_interactive(sys.stdout)):
        from rlflame.console.sweep_live import LiveSweepDisplay

        return LiveSweepDisplay()
    return PlainSweepDisplay()
