"""Opens an image in the viewer of the desktop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def has_display(environment: Mapping[str, str]) -> bool:
    names = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform == "darwin" or any(environment.get(name) for name in names)


def open_image(image: Path) -> bool:
    """Open an image in a window; return False without a display or a viewer, or in CI."""
    viewer = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if viewer is None or os.environ.get("CI") or not has_display(os.environ):
        return False
    silence = subprocess.DEVNULL
    try:
        subprocess.Popen(  # the viewer stays open after the command
            [viewer, str(image.absolute())],
            stdin=silence,
            stdout=silence,
            stderr=silence,
            start_new_session=True,
        )
    except OSError:
        return False
    return True
