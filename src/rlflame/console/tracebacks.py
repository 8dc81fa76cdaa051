"""What is left of a traceback for who did not ask for all of it. Must not know: what failed."""

from __future__ import annotations

import re
from pathlib import Path

import rlflame

_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.*)", line \d+, in ')
_CHAINED = re.compile("(During handling of|The above exception was) .*:")
#: Of this machine, and of others, whose workers send theirs.
_OWN = (str(Path(rlflame.__file__).parent), "/rlflame/rollout/")


def brief(text: str, message: str) -> str:
    """Of each traceback in a text the innermost frame that is not ours and what was raised, if the
    message does not say it; of one that led to another one what was raised alone."""
    lines, said = text.splitlines(), " ".join(message.split())
    kept: list[str] = []
    while lines:
        line = lines.pop(0)
        if line != _BEGIN or not (frames := _frames(lines)):
            kept.append(line)
            continue
        raised: list[str] = []
        # A message of several lines goes on below its first.
        while lines and lines[0] and (not raised or " ".join(lines[0].split()) in said):
            raised.append(lines.pop(0))
        raised = [line for line in raised if " ".join(line.split()) not in said]
        if _leads_to_another(lines):
            kept += [f"  {line}" for line in raised]
        else:
            kept += [*frames, *raised]
    return "\n".join(kept)


def _frames(lines: list[str]) -> list[str]:
    """Takes all frames from the lines; gives the two lines of the one that matters."""
    found: list[list[str]] = []
    while lines and lines[0].startswith(" "):
        line = lines.pop(0)
        if _FRAME.match(line):
            found.append([])
        if found:
            found[-1].append(line)
    theirs = [frame for frame in found if not _is_own(frame[0])]
    # Below a frame stands its code, and below that what part of it is meant.
    return (theirs or found)[-1][:2] if found else []


def _is_own(line: str) -> bool:
    found = _FRAME.match(line)
    return found is not None and any(own in found[1] for own in _OWN)


def _leads_to_another(lines: list[str]) -> bool:
    """Takes the words between two tracebacks from the lines, if there are any."""
    rest = [line for line in lines[:4] if line]
    if len(rest) < 2 or not _CHAINED.fullmatch(rest[0]) or rest[1] != _BEGIN:
        return False
    while lines[0] != _BEGIN:
        lines.pop(0)
    return True
