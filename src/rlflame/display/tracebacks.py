"""A traceback's last words. Must not know: what failed."""

from __future__ import annotations

import re
from pathlib import Path

import rlflame

_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.*)", line \d+, in ')
#: Of this machine, and of others, whose workers send theirs.
_OWN = (str(Path(rlflame.__file__).parent), "/rlflame/rollout/")


def brief(text: str) -> str:
    """Of the last traceback in a text the innermost frame that is not ours; the rest as it is."""
    if _BEGIN not in text:
        return text
    before, _, last = text.rpartition(_BEGIN)
    before = before.partition(_BEGIN)[0]
    frames: list[list[str]] = []
    rest = last.splitlines()[1:]
    while rest and rest[0].startswith(" "):
        line = rest.pop(0)
        if _FRAME.match(line):
            frames.append([])
        if frames:
            frames[-1].append(line)
    if not frames:
        return text
    theirs = [lines for lines in frames if not _is_own(lines[0])]
    # Below a frame stands its code, and below that what part of it is meant.
    frame = (theirs or frames)[-1][:2]
    # Then what was raised, which the message says; it may have several lines, and so may this.
    printed = next((i for i, line in enumerate(rest) if line == "It had printed:"), len(rest))
    return "\n".join([*before.splitlines(), *frame, *rest[printed:]])


def _is_own(line: str) -> bool:
    found = _FRAME.match(line)
    return found is not None and any(own in found[1] for own in _OWN)
