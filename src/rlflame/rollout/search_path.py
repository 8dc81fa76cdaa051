"""Sets the folders from which this process and its children import modules.

This module runs first, so it imports only modules that the interpreter loads at startup.
"""

import os
import sys


def remove_current_folder() -> None:
    """Remove the current folder from the module path unless PYTHONPATH names it.

    `python -m` adds the current folder as the first entry, and an empty entry in PYTHONPATH also
    stands for it. A file in this folder could shadow any module of the same name.
    """
    sys.path[:] = _list_entries_without_current_folder()


def make_child_path() -> str:
    """Return the PYTHONPATH for a child process, without the current folder."""
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
    # They are kept even if one is the current folder. They are not found by name, because any
    # folder may be called `site-packages`.
    library = os.path.dirname(os.__file__)
    # `site` is missing under `python -S`, and importing it could search the current folder.
    site = sys.modules.get("site")
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
