"""Arguments, errors and marked blocks for the scripts in this folder.

This module imports only the standard library, because some scripts run in environments without
rlflame.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path


def ended(main: Callable[[], int | None]) -> None:
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "hint"):
            raise
        # An error of rlflame has a message and a hint.
        print(f"{error}\n  hint: {error.hint}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def table(text: str) -> Path:
    """Parse the path of a file that can be written."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def read_block(page: Path, name: str) -> str:
    """Return the text between the markers of this name in a page."""
    return _split_block(page, name)[1]


def write_block(page: Path, name: str, text: str) -> None:
    """Replace the text between the markers of this name in a page."""
    before, _, after = _split_block(page, name)
    page.write_text(f"{before}{text}{after}", "utf-8")


def _split_block(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}:begin -->\n", f"\n<!-- {name}:end -->"
    before, start, rest = page.read_text("utf-8").partition(begin)
    block, stop, after = rest.partition(end)
    if not (start and stop):
        raise ValueError(f"{page} has no markers {name}:begin and {name}:end")
    return before + start, block, stop + after
