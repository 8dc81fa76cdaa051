"""The folders from which this process and its children import modules.

Imports only modules that every interpreter has loaded at its start, because it runs first.
"""

import os
import sys


def remove_current_folder() -> None:
    """Remove the current folder from the module path unless PYTHONPATH names it.

    `python -m` adds it as the first entry, and an empty entry in PYTHONPATH means it too. A file in
    it would replace any module that is not installed.
    """
    sys.path[:] = _list_entries_without_current_folder()


def make_child_path() -> str:
    """Return a child's PYTHONPATH: its own path without the current folder."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    entries = [*_list_entries_without_current_folder(), os.path.dirname(package)]
    return os.pathsep.join(dict.fromkeys(entries))


def _list_entries_without_current_folder() -> list[str]:
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept_folders = {*map(os.path.abspath, filter(os.path.isabs, paths)), *_find_installed_folders()}
    return [
        entry
        for entry in sys.path
        if os.path.isabs(entry) and (entry in kept_folders or not _is_current_folder(entry))
    ]


def _find_installed_folders() -> list[str]:
    """Return the folders of the standard library and of installed packages."""
    # They stay even if the user is in one. Any folder may be called `site-packages`.
    library = os.path.dirname(os.__file__)
    site = sys.modules.get(
        "site"
    )  # missing under `python -S`; importing it could search the folder
    return [
        library,
        os.path.join(library, "lib-dynload"),
        *(site.getsitepackages() if site is not None else ()),
        str(getattr(site, "USER_SITE", None)),
    ]


def _is_current_folder(entry: str) -> bool:
    try:
        return os.path.samefile(entry, os.curdir)
    except OSError:
        return False
