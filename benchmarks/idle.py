"""Whether this machine has anything else to do, asked by scripts that time something."""

from __future__ import annotations

from rlflame.bench import surroundings


def others() -> str:
    """How many processors are at work, for a table; it is said aloud where that spoils it."""
    now = surroundings.at_work()
    if surroundings.look().busy if now is None else now > 0.5:
        print("note: this machine is busy with other work; what is timed now is worthless")
    return "" if now is None else f"{now:.2f}"
