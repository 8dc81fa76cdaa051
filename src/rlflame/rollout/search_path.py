"""The folders that this process and its children import modules from.

Imports nothing but what every interpreter has loaded at its start, because it runs first.
"""

import os
import sys


def remove_current_folder() -> None:
    """Take the current folder off this process's module path, unless PYTHONPATH spells it out.

    `python -m` puts it first, and an empty entry in PYTHONPATH means it too. A file that lies
    there would stand in for any module that is not installed.
    """
    sys.path[:] = _entries_without_current_folder()


def child_path() -> str:
    """PYTHONPATH of a child process: the path of this one without the current folder."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    entries = [*_entries_without_current_folder(), os.path.dirname(package)]
    return os.pathsep.join(dict.fromkeys(entries))


def _entries_without_current_folder() -> list[str]:
    spelled_out = [*filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return [
        entry
        for entry in sys.path
        if os.path.isabs(entry)
        and (
            entry in spelled_out
            or entry.endswith(("-packages", ".zip"))
            or not _is_current_folder(entry)
        )
    ]


def _is_current_folder(entry: str) -> bool:
    try:
        return os.path.samefile(entry, os.curdir)
    except OSError:
        return False
