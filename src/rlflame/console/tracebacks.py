"""What is left of a traceback for who did not ask for all of it. Must not know: what failed."""

from __future__ import annotations

import re
from pathlib import Path

import rlflame

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.*)", line \d+, in ')
_CHAIN_LINE = re.compile("(During handling of|The above exception was) .*:")
#: Of this machine, and of others, whose workers send theirs.
_RLFLAME_PATHS = (str(Path(rlflame.__file__).parent), "/rlflame/rollout/")


def shorten_traceback(text: str, message: str) -> str:
    """Of each traceback in a text the innermost frame that is not ours and what was raised, if the
    message does not say it; of one that led to another one what was raised alone."""
    lines, message_text = text.splitlines(), " ".join(message.split())
    output_lines: list[str] = []
    while lines:
        line = lines.pop(0)
        if line != _HEADER or not (frames := _pop_frames(lines)):
            output_lines.append(line)
            continue
        error_lines: list[str] = []
        # A message of several lines goes on below its first.
        while (
            lines and lines[0] and (not error_lines or " ".join(lines[0].split()) in message_text)
        ):
            error_lines.append(lines.pop(0))
        error_lines = [line for line in error_lines if " ".join(line.split()) not in message_text]
        if _skip_chain_lines(lines):
            output_lines += [f"  {line}" for line in error_lines]
        else:
            output_lines += [*frames, *error_lines]
    return "\n".join(output_lines)


def _pop_frames(lines: list[str]) -> list[str]:
    """Takes all frames from the lines; gives the two lines of the one that matters."""
    frames: list[list[str]] = []
    while lines and lines[0].startswith(" "):
        line = lines.pop(0)
        if _FRAME.match(line):
            frames.append([])
        if frames:
            frames[-1].append(line)
    foreign_frames = [frame for frame in frames if not _is_rlflame_frame(frame[0])]
    # Below a frame stands its code, and below that what part of it is meant.
    return (foreign_frames or frames)[-1][:2] if frames else []


def _is_rlflame_frame(line: str) -> bool:
    match = _FRAME.match(line)
    return match is not None and any(path in match[1] for path in _RLFLAME_PATHS)


def _skip_chain_lines(lines: list[str]) -> bool:
    """Takes the words between two tracebacks from the lines, if there are any."""
    next_lines = [line for line in lines[:4] if line]
    if len(next_lines) < 2 or not _CHAIN_LINE.fullmatch(next_lines[0]) or next_lines[1] != _HEADER:
        return False
    while lines[0] != _HEADER:
        lines.pop(0)
    return True
