"""Which of the four ways a job of seeds is shown. Must not know: what they say."""

from __future__ import annotations

import sys

from rlflame.display.mouth import draws
from rlflame.seeds.show import SeedsDisplay
from rlflame.seeds.shown import JsonSeeds, PlainSeeds, QuietSeeds


def choose(mode: str) -> SeedsDisplay:
    """The display for a mode, as display/choice.py has them for a single run."""
    if mode == "json":
        return JsonSeeds()
    if mode == "quiet":
        return QuietSeeds()
    if mode == "live" or (mode == "auto" and draws(sys.stdout)):
        from rlflame.seeds.live import LiveSeeds

        return LiveSeeds()
    return PlainSeeds()
